"""Two processes over Gloo: their gradients are checked and their steps timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import ddp, record, steps
from benchmarks.steps import EAGER, EAGERLY, FUSED, GRAPH, OURS, WAYS
from tests.benchmarks.processes import by_two


def test_two_processes(tmp_path: Path) -> None:
    path, said = by_two("ddp", tmp_path, "--networks", FUSED, seconds=90.0)
    result = record.read(path)
    assert result["settings"]["processes"] == 2
    assert [row["network"] for row in result["rows"]] == [FUSED] * 2
    eager, graph = result["rows"]
    assert (eager["way"], eager["status"]) == (EAGERLY, "ok"), eager
    one, several = eager["alone_ms"]["median"], eager["together_ms"]["median"]
    assert eager["throughput"] == pytest.approx(2 * one / several, rel=1e-3)
    assert eager["images_per_second"] == pytest.approx(4e3 / several, rel=0.01)
    assert graph["reason"] == steps.NO_GRAPHS
    assert result["bars"] == []  # they are meant for GPUs
    assert f"2 processes, {FUSED}, eager: " in said


def row(network: str, way: str, ms: float, mib: int, **more: Any) -> dict[str, Any]:
    found = {"network": network, "way": way, "together_ms": {"median": ms}, "together_bytes": mib}
    return found | {"processes": 2, "status": "ok", "throughput": 1.9} | more


def test_bars() -> None:
    rows = [row(FUSED, EAGERLY, 1, 1), row(OURS, GRAPH, 1, 1)]
    eager, graph = ddp.judge(ddp.WORKLOAD, rows)
    assert (eager["measured"], eager["bar"], eager["met"]) == (1.9, 1.85, True)
    assert (graph["measured"], graph["met"]) == (None, False)
    assert eager["what"] == "2 GPUs, eager: times the throughput of one"


def test_bars_against_the_eager_loop() -> None:
    rows = [row(FUSED, way, 4, 30) for way in WAYS]
    rows += [row(EAGER, EAGERLY, 10, 100), row(EAGER, GRAPH, 5, 1, status="wrong")]
    assert [(b["measured"], b["bar"], b["met"]) for b in ddp.judge("alexnet-imagenet", rows)] == [
        (0.4, 0.5, True), (None, 0.5, False), (0.3, 0.25, False)
    ]  # fmt: skip


def test_it_takes_several_processes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ddp.arguments(["--quick"])
    assert "start it with torchrun --nproc_per_node N" in capsys.readouterr().err
