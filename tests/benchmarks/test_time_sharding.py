"""Two processes over Gloo share time: verified, timed and predicted."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import plots, record, time_sharding
from tests.benchmarks.processes import by_two


def test_two_processes(tmp_path: Path) -> None:
    arguments = "--chunks", "1", "2", "--rounds", "1"
    path, _ = by_two("time_sharding", tmp_path, *arguments, seconds=120.0)
    result = record.read(path)
    layers = [r for r in result["rows"] if r["what"] == "layer"]
    assert [(r["T"], r["time"]) for r in layers] == [(8, 1), (8, 2)]
    assert layers[1]["by_chunks"].keys() == {"1", "2"}
    assert layers[1]["predicted"] > 0
    nets = [(r["data"], r["time"], r["statistics"]) for r in result["rows"]
            if r["what"] == "network"]  # fmt: skip
    assert nets == [(1, 1, "exact"), (2, 1, "exact"), (1, 2, "exact"), (1, 2, "shard")]
    assert result["bars"] == []  # they are meant for GPUs
    assert path.with_suffix(".png").exists()


def test_bars() -> None:
    layer = {"what": "layer", "T": 1024, "time": 2, "speedup": 1.8, "predicted": 1.9}
    net = {"what": "network", "statistics": "shard", "time": 4, "data": 1, "batch": 16,
           "speedup": 3.0, "memory": 0.28}  # fmt: skip
    found = {bar["what"]: bar for bar in time_sharding.bars([layer, net])}
    assert found["layer, T=1024, 2 GPUs: speed-up"]["met"]
    assert not found["layer, T=4096, 4 GPUs: speed-up"]["met"]
    assert not found["network, shard statistics, 4 GPUs: speed-up"]["met"]
    assert found["network, 4 GPUs: memory of one's"]["met"]
    assert found["speed-up predicted: largest error"]["measured"] == pytest.approx(0.0556, abs=1e-3)
    assert len(time_sharding.bars([layer])) == 5  # nothing is asked of GPUs that there are not


def test_nothing_to_draw(tmp_path: Path) -> None:
    assert plots.time_sharding({"rows": []}, tmp_path / "none.png") is None


def test_it_takes_several_processes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        time_sharding.arguments(["--quick"])
    assert "start it with torchrun --nproc_per_node N" in capsys.readouterr().err
