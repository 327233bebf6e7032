"""The scripts at tiny size on a GPU, with device times and peak memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import events, jelly, layers, networks, neurons, record
from benchmarks.events import DENSE, EVENTS, REPLAY
from benchmarks.networks import CONVOLUTIONS, FUSED, RELU
from benchmarks.runner import WAYS

# Of modules that Inductor imports: the runner resets what torch.compile has compiled.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

QUICK = ("--quick", "--device", "cuda", "--out")


@pytest.fixture
def without_spikingjelly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results do not depend on whether it is installed, nor on what it warns of, which would be an
    error here."""

    def unavailable(*names: str) -> tuple[Any, ...]:
        raise ImportError("SpikingJelly is not compared here")

    monkeypatch.setattr(jelly, "spikingjelly", unavailable)


@pytest.mark.usefixtures("without_spikingjelly")
def test_timestep_scaling(tmp_path: Path) -> None:
    command = [*QUICK, str(tmp_path), "--N", "100000", "--T", "4", "32"]
    result = record.read(neurons.main(["steps", *command]))
    assert result["left_out"] == []
    for row in result["rows"]:
        found = {c["name"]: c for c in row["contenders"]}
        ours, eager = found[layers.OURS], found[layers.LOOP]
        assert ours["status"] == eager["status"] == "ok", (ours, eager)
        assert ours["device_ms"]["median"] > 0
        # At the peak there are y and grad_x, as large as the inputs, and the saved states.
        assert row["input_bytes"] <= ours["peak_bytes"] < 2 * row["input_bytes"]
        assert ours["peak_bytes"] < eager["peak_bytes"]


@pytest.mark.usefixtures("without_spikingjelly")
def test_neurons(tmp_path: Path) -> None:
    result = record.read(neurons.main([*QUICK, str(tmp_path)]))
    assert result["left_out"] == []
    for row in result["rows"]:
        ours, *others = row["contenders"]
        assert (ours["name"], ours["status"]) == (layers.OURS, "ok"), ours
        assert ours["device_ms"]["median"] > 0
        for other in others:
            assert other["status"] == "ok" or other["name"] != neurons.CHANNELS_LAST, other
        if not row["training"]:
            # The allocator returns multiples of 512 bytes.
            assert ours["peak_bytes"] == -(-row["output_bytes"] // 512) * 512


def test_networks(tmp_path: Path) -> None:
    names = (FUSED, layers.OURS, RELU, CONVOLUTIONS, layers.LOOP)
    both = ("--steps", "training", "evaluation")
    result = record.read(networks.main([*QUICK, str(tmp_path), *both, "--networks", *names]))
    assert result["left_out"] == []
    for row in result["rows"]:
        found = {(c["network"], c["way"]): c for c in row["contenders"]}
        for name in names:
            for way in WAYS:
                assert found[name, way]["status"] == "ok", found[name, way]
                assert found[name, way]["peak_bytes"] > 0


def test_first_call(tmp_path: Path) -> None:
    path = neurons.main(["first_call", *QUICK, str(tmp_path), "--backend", "triton"])
    rows = record.read(path)["rows"]
    assert [(row["neuron"], row["status"]) for row in rows] == [("own", "ok"), ("LIF", "ok")]


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_events(tmp_path: Path) -> None:
    result = record.read(events.main([*QUICK, str(tmp_path)]))
    for row in result["rows"]:
        found = {c["name"]: c["status"] for c in row["contenders"]}
        assert all(found[name] == "ok" for name in (DENSE, EVENTS, DENSE + REPLAY)), found
