"""The GPU's scripts in small, with device times and peak memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import (
    event_networks,
    event_streaming,
    events,
    first_call,
    layer,
    networks,
    neurons,
    record,
    steps,
    timestep_scaling,
)
from benchmarks.event_networks import DENSE, EVENTS, GRAPH, LOOP, Case


def test_timestep_scaling(tmp_path: Path) -> None:
    command = "--device cuda --N 100000 --T 4 32 --quick --out"
    result = record.read(timestep_scaling.main([*command.split(), str(tmp_path)]))
    assert result["machine"]["gpu"]
    assert [(row["dtype"], row["T"]) for row in result["rows"]] == [
        ("float32", 4), ("float32", 32), ("bfloat16", 4), ("bfloat16", 32)
    ]  # fmt: skip
    for row in result["rows"]:
        found = {c["name"]: c for c in row["contenders"]}
        ours, eager = found[layer.OURS], found[layer.EAGER]
        assert ours["status"] == eager["status"] == "ok"
        assert ours["device_ms"]["median"] > 0
        # At the peak there are y and grad_x, as large as the inputs, and the states kept.
        assert row["input_bytes"] <= ours["peak_bytes"] < 2 * row["input_bytes"]
        assert ours["after_forward_bytes"] < ours["peak_bytes"] < eager["peak_bytes"]


def test_neurons(tmp_path: Path) -> None:
    result = record.read(neurons.main(["--device", "cuda", "--quick", "--out", str(tmp_path)]))
    assert result["left_out"] == []
    for row in result["rows"]:
        ours, *others = row["contenders"]
        assert (ours["name"], ours["status"]) == (layer.OURS, "ok"), ours
        assert ours["device_ms"]["median"] > 0
        for other in others:
            if other["name"] in (neurons.CHANNELS_LAST, neurons.BARE):
                assert other["status"] == "ok", other
        if not row["training"]:
            # The allocator hands out multiples of 512 bytes.
            assert ours["peak_bytes"] == -(-row["output_bytes"] // 512) * 512


def test_networks(tmp_path: Path) -> None:
    command = ["--device", "cuda", "--quick", "--also", steps.EAGER, "--out", str(tmp_path)]
    result = record.read(networks.main(command))
    assert result["left_out"] == []
    assert len(result["rows"]) == 4
    for row in result["rows"]:
        found = {(c["network"], c["way"]): c for c in row["contenders"]}
        for name in (steps.OURS, steps.RELU, steps.CONVOLUTIONS, steps.EAGER):
            for way in steps.WAYS:
                assert found[name, way]["status"] == "ok", found[name, way]
                assert found[name, way]["peak_bytes"] > 0


def test_first_call(tmp_path: Path) -> None:
    command = ["--backend", "triton", "--quick", "--out", str(tmp_path)]
    path = first_call.main(command)
    assert path is not None
    rows = record.read(path)["rows"]
    assert [(row["neuron"], row["status"]) for row in rows] == [("own", "ok"), ("LIF", "ok")]


# Of PyTorch 2.11, where torch.compile's back end is first imported, and where it compiles float32.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(20, 4, 50, 0.2, (60, 50), (0.05,), loop_bar=1.0)
    for module in (events, event_networks, event_streaming):
        monkeypatch.setattr(module, "CASES", {"shd": case, event_streaming.CASE: case})
    options = "--cases shd --loop --streaming --quick --rounds 2 --device cuda --out"
    result = record.read(events.main([*options.split(), str(tmp_path)]))
    (row,) = result["rows"]
    found = {c["name"]: c for c in row["contenders"]}
    for name in (DENSE, EVENTS, LOOP, DENSE + GRAPH, LOOP + GRAPH):
        assert found[name]["status"] == "ok", found[name]
    assert found[EVENTS + GRAPH]["reason"] == event_networks.NO_GRAPH
    assert row["times_dense"][DENSE + GRAPH] > 1
    assert "our best, than the compiled loop" in result["bars"][0]["what"]
    assert [c["status"] for c in result["streaming"]["contenders"]] == ["ok"] * 4
