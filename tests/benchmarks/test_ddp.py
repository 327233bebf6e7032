"""Two processes over Gloo: their gradients are checked and their steps timed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import ddp, record, steps
from benchmarks.steps import EAGERLY, GRAPH

SECONDS = 90.0


def test_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", "-m", "benchmarks.ddp", "--quick", "--device", "cpu"]
    with subprocess.Popen(
        [*command, "--out", str(tmp_path)],
        cwd=record.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends the two
            raise
    assert process.returncode == 0, said
    (path,) = tmp_path.glob("ddp-*.json")
    result = record.read(path)
    assert result["settings"]["processes"] == 2
    eager, graph = result["rows"]
    assert (eager["way"], eager["status"]) == (EAGERLY, "ok"), eager
    one, several = eager["alone_ms"]["median"], eager["together_ms"]["median"]
    assert eager["throughput"] == pytest.approx(2 * one / several, rel=1e-3)
    assert eager["images_per_second"] == pytest.approx(4e3 / several, rel=0.01)
    assert graph["reason"] == steps.NO_GRAPHS
    assert result["bars"] == []  # they are meant for GPUs
    assert "2 processes, eager: " in said


def test_bars() -> None:
    rows = [
        {"way": EAGERLY, "processes": 2, "status": "ok", "throughput": 1.9},
        {"way": GRAPH, "processes": 2, "status": "unavailable", "reason": "why"},
    ]
    eager, graph = ddp.bars(rows)
    assert (eager["measured"], eager["bar"], eager["met"]) == (1.9, 1.85, True)
    assert (graph["measured"], graph["met"]) == (None, False)
    assert eager["what"] == "2 GPUs, eager: times the throughput of one"


def test_it_takes_several_processes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ddp.arguments(["--quick"])
    assert "start it with torchrun --nproc_per_node N" in capsys.readouterr().err
