"""Two processes over Gloo share time: verified, timed and predicted."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

import spikefuse as sf
from benchmarks import plots, record, time_networks, time_sharding
from benchmarks.ranks import forecast
from benchmarks.steps import EAGERLY, GRAPH
from spikefuse.distributed import Plan
from spikefuse.distributed.plan import Layer
from tests.benchmarks.processes import by_two


def test_two_processes(tmp_path: Path) -> None:
    arguments = "--chunks", "1", "2", "--network-chunks", "1", "4", "--rounds", "1"
    path, _ = by_two("time_sharding", tmp_path, *arguments, seconds=120.0)
    result = record.read(path)
    layers = [r for r in result["rows"] if r["what"] == "layer"]
    assert [(r["T"], r["time"]) for r in layers] == [(8, 1), (8, 2)]
    assert layers[1]["by_chunks"].keys() == {"1", "2"}
    assert layers[1]["predicted"] > 0
    nets = [(r["data"], r["time"], r["statistics"]) for r in result["rows"]
            if r["what"] == "network"]  # fmt: skip
    assert all(r["way"] == EAGERLY for r in result["rows"])
    alone = [r for r in result["rows"] if r["what"] == "network" and r["time"] == 2]
    assert all(r["by_chunks"].keys() == {"1", "1, waiting", "4, waiting"} for r in alone)
    assert all(r["predicted"] > 0 for r in alone)
    assert nets == [(1, 1, "exact"), (2, 1, "exact"), (1, 2, "exact"), (1, 2, "shard")]
    assert result["bars"] == []  # they are meant for GPUs
    assert path.with_suffix(".png").exists()


def test_bars() -> None:
    layer = {"what": "layer", "way": GRAPH, "T": 1024, "time": 2, "speedup": 1.8, "predicted": 1.9}
    slow = {**layer, "way": EAGERLY, "speedup": 1.0, "predicted": 1.0}
    net = {"what": "network", "way": GRAPH, "statistics": "shard", "time": 4, "data": 1,
           "batch": 16, "speedup": 3.0, "memory_of_one": 0.9}  # fmt: skip
    eager = {**net, "way": EAGERLY, "speedup": 4.0, "memory_of_one": 0.28}
    found = {bar["what"]: bar for bar in time_sharding.bars([layer, slow, net, eager])}
    assert found["layer, CUDA graph, T=1024, 2 GPUs: speed-up"]["met"]
    assert not found["layer, CUDA graph, T=4096, 4 GPUs: speed-up"]["met"]
    of_net = found["network, CUDA graph, shard statistics, 4 GPUs: speed-up"]
    assert (of_net["measured"], of_net["met"]) == (3.0, False)
    assert found["network, 4 GPUs: memory of one's"]["met"]
    assert found["CUDA graph: speed-up predicted: largest error"]["measured"] == pytest.approx(
        0.0556, abs=1e-3
    )
    assert len(time_sharding.bars([layer])) == 5  # nothing is asked of GPUs that there are not


class Step:
    """One that gives the same each time, on a GPU that is none."""

    device = torch.device("cpu")

    def __init__(self, *gradients: list[float]) -> None:
        self.gradients = list(gradients)

    def __call__(self) -> list[torch.Tensor]:
        return [torch.tensor(self.gradients.pop(0) if len(self.gradients) > 1
                             else self.gradients[0])]  # fmt: skip


def test_a_replay_is_held_to_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_networks, "highest", lambda value, device: value)
    eager, static = Step([1.0, 2.0]), torch.tensor([0.0, 0.0])

    def replay(value: float) -> list[torch.Tensor]:
        static.copy_(torch.tensor([value, 2.0]))
        return [static]

    assert time_networks.verify(eager, lambda: replay(1.0)) == 0.0
    with pytest.raises(AssertionError, match=r"a replay is 0\.447 from an eager step"):
        time_networks.verify(eager, lambda: replay(2.0))
    # As far as another eager step.
    assert time_networks.verify(Step([1.0, 2.0], [2.0, 2.0]), lambda: replay(2.0)) == 0.447
    with pytest.raises(AssertionError, match="a replay is"):
        time_networks.verify(eager, lambda: [static])  # which writes nothing


def test_what_cannot_be_recorded_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def graphed(*_: object) -> None:
        raise RuntimeError("no capture here")

    monkeypatch.setattr(time_sharding, "graphed", graphed)
    monkeypatch.setattr(time_networks, "recorded", graphed)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    args = time_sharding.arguments(["--quick", "--device", "cpu"])
    assert args.ways == [EAGERLY]
    row = time_networks.measure(
        time_networks.workload_of(args), None, torch.device("cpu"), args, "exact", GRAPH
    )
    assert (row["status"], row["reason"]) == ("unavailable", "RuntimeError: no capture here")
    axis = mock.Mock(**{"size.return_value": 1, "get_local_rank.return_value": 0})
    net = sf.Temporal(sf.LIF())
    (row,) = time_sharding.layer_rows(
        2, {1: mock.MagicMock(__getitem__=lambda *_: axis, **{"size.return_value": 1})}, {1: net},
        torch.device("cpu"), args, GRAPH,
    )  # fmt: skip
    assert row["status"] == "unavailable"
    assert "reason RuntimeError: no capture here" in time_sharding.progress(row)


def test_nothing_to_draw(tmp_path: Path) -> None:
    assert plots.time_sharding({"rows": []}, tmp_path / "none.png") is None


def test_it_takes_several_processes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        time_sharding.arguments(["--quick"])
    assert "start it with torchrun --nproc_per_node N" in capsys.readouterr().err


def test_forecasts_are_no_measurements() -> None:
    layer = Layer(0.8, 0.0, 1000, mend=0.01)
    made = Plan(4, 16, 0.0, 1.0, [layer], 0.01, 1e5, capacity=1, scaled_bytes=1)
    about = {"what": "layer", "way": "CUDA graph", "T": 8, "N": 10}
    (row,) = forecast(about, made, [8])
    splits = [(r["data"], r["time"]) for r in forecast(about, made, [8], (1, 2, 4, 8))]
    assert splits == [(1, 8), (2, 4), (4, 2), (8, 1)]
    assert row["status"] == "not measured"
    assert "ms" not in row
    assert row["predicted"] == 1 / made.seconds(8, row["chunks"], 1, row["speculate"])
    assert row["by_paper"] == made.speedup_by_paper(8)
    judged = time_sharding.bars([row])
    assert not any(bar["met"] for bar in judged)
