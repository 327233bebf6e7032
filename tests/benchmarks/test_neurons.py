"""The neurons' script in small, what fails in it, and its bars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gated, layer, lif, neurons, record
from benchmarks.neurons import Row


def run(tmp_path: Path, *more: str) -> dict[str, Any]:
    command = ["--device", "cpu", "--quick", "--out", str(tmp_path), *more]
    return record.read(neurons.main(command))


def test_rows_are_verified_and_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups = ["lif", "inference", "custom", "layout", "host"]
    result = run(tmp_path, "--dtype", "float32", "--rows", *groups)
    assert [row["group"] for row in result["rows"]] == ["lif", "inference", "host", "custom"]
    assert result["left_out"] == []
    for row in result["rows"]:
        found = {c["name"]: c for c in row["contenders"]}
        assert found[layer.OURS]["status"] == "ok"
        assert found[layer.OURS]["fraction"]["wall_ms"] > 0
        assert row["verified_neurons"] == row["N"]
        assert all(c["status"] == "ok" or c["reason"] for c in found.values())
    rivals = [{c["name"] for c in row["contenders"]} - {layer.OURS} for row in result["rows"]]
    assert rivals == [set(lif.RIVALS), set(), {*lif.RIVALS, neurons.BARE}, {gated.RIVAL}]
    counts = [row["num_bytes"] / row["N"] / row["T"] for row in result["rows"]]
    assert counts == [20, 8, 20, 40]
    assert result["bars"] == []  # they are meant for a GPU
    assert "inference: copy" in capsys.readouterr().out


def test_layouts_are_compared(tmp_path: Path) -> None:
    (row,) = run(tmp_path, "--rows", "layout")["rows"]
    assert [c["name"] for c in row["contenders"]] == [layer.OURS, neurons.CHANNELS_LAST]
    assert all(c["status"] == "ok" for c in row["contenders"])


def test_a_row_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Any:
        raise RuntimeError("no such neuron\nand more")

    models = neurons.models() | {"ALIF": neurons.Model(broken)}
    monkeypatch.setattr(neurons, "models", lambda: {n: models[n] for n in ("ALIF", "LIF")})
    result = run(tmp_path, "--dtype", "float32", "--rows", "zoo", "lif")
    assert [row["neuron"] for row in result["rows"]] == ["LIF"]
    reasons = {one["row"].split(",")[0]: one["reason"] for one in result["left_out"]}
    assert reasons["ALIF"] == "left out, RuntimeError: no such neuron"
    assert reasons["Izhikevich"] == "left out, KeyError: 'Izhikevich'"


def test_rows_stop_when_the_time_is_up(tmp_path: Path) -> None:
    result = run(tmp_path, "--rows", "lif", "--within", "0")
    assert result["rows"] == []
    assert [one["reason"] for one in result["left_out"]] == ["left out, the time is up"] * 2


@pytest.mark.parametrize("dtype", neurons.DTYPES)
@pytest.mark.parametrize("model", ["PLIF per channel", "ALIF", "CubaLIF", "Izhikevich"])
def test_the_zoo_spikes_and_is_known(model: str, dtype: str) -> None:
    found = neurons.models()[model]
    neuron = found.make()
    inputs = layer.Inputs(
        (32, 2, 64, 1), neurons.DTYPES[dtype], torch.device("cpu"), high=found.high
    )
    truth = layer.Truth.of(neuron, inputs, found.exact)
    rate = truth.expected.outputs[0].float().mean()
    assert 0.02 < rate < 0.9
    assert truth.expected.grads[0].isfinite().all()
    loop = layer.eager(neuron, inputs, 32)
    inputs.prepare()
    assert loop.run is not None
    truth.verify(loop, loop.run())


def contender(name: str, device_ms: float, fraction: float = 0.5, **more: Any) -> dict[str, Any]:
    times = {"device_ms": {"median": device_ms}, "wall_ms": {"median": 2 * device_ms}}
    return {"name": name, "status": "ok", "fraction": {"device_ms": fraction}} | times | more


@pytest.mark.parametrize(
    ("group", "rival", "expected"),
    [
        ("lif", None, [("of the roofline", 0.7, 0.8, False)]),
        ("wide", None, [("of the roofline", 0.7, 0.85, False)]),
        ("zoo", None, [("of the roofline", 0.7, 0.65, True)]),
        ("custom", (gated.RIVAL, 0.16),
         [("of the roofline", 0.7, 0.6, True), ("times faster than FlexSN", 1.6, 1.5, True)]),
        ("layout", (neurons.CHANNELS_LAST, 0.094),
         [("channels-last apart from contiguous", 0.06, 0.05, False)]),
        ("short", None, [("wall ms", 0.2, 0.12, False)]),
        ("host", (neurons.BARE, 0.1), [("wall µs", 200.0, 120.0, False)]),
    ],
)  # fmt: skip
def test_bars(group: str, rival: Any, expected: list[tuple[Any, ...]]) -> None:
    row = Row(group, "LIF", (4, 1, 8), "float32")
    found = {"contenders": [contender(layer.OURS, 0.1, 0.7)], "output_bytes": 128}
    found["contenders"] += [contender(*rival)] if rival else []
    made = neurons.bars(row, found)
    assert [(b["what"].split(": ")[1], b["measured"], b["bar"], b["met"]) for b in made] == expected
    missing = neurons.bars(row, None)
    assert [(b["measured"], b["met"]) for b in missing] == [(None, False)] * len(expected)


def test_inference_may_write_nothing_but_spikes() -> None:
    row = Row("inference", "LIF", (4, 1, 8), "float32", training=False)
    for peak, met in ((128, True), (640, False)):
        ours = contender(layer.OURS, 0.1, 0.9, peak_bytes=peak)
        roofline, beyond = neurons.bars(row, {"contenders": [ours], "output_bytes": 128})
        assert roofline["met"]
        assert (beyond["measured"], beyond["met"]) == (peak - 128, met)


def test_all_rows_of_the_figures() -> None:
    plan = list(neurons.rows(list(neurons.GROUPS), list(neurons.DTYPES), quick=False))
    assert {row.group for row in plan} == set(neurons.GROUPS)
    assert len({row.title for row in plan}) == len(plan)
    assert plan[0].title == "LIF, T=128, 1M neurons, float32"
    assert all(row.model in neurons.models() for row in plan)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--quick", "--rounds", "-1"], "--rounds must be at least 1"),
        (["--device", "cpu"], "sized for a GPU: add --quick"),
        (["--rows", "speed"], "invalid choice: 'speed'"),
    ],
)
def test_arguments_are_checked(
    wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        neurons.arguments(wrong)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
