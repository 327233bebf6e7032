"""Weak scaling on events: processes are started, compared with a whole network, and judged."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import event_scaling, event_tables, plots, record
from benchmarks.event_scaling import LARGEST, SCALING
from benchmarks.runner import Contender
from tests.benchmarks.test_tables import result


def test_one_and_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--ranks 2 1 --quick --device cpu --largest 0 --T 4 --rounds 1 --out"
    path = event_scaling.main([*options.split(), str(tmp_path)])
    assert path is not None
    one, two = record.read(path)["rows"]
    assert [one["ranks"], two["ranks"]] == [1, 2]
    assert [one["layers"], two["layers"]] == [2, 4]  # each rank brings as many neurons
    assert [one["neurons"], two["neurons"]] == [200, 400]
    layer, last = 100 * 100 + 100, 100 * 20 + 20
    assert [one["parameters"], two["parameters"]] == [2 * layer + last, 4 * layer + last]
    assert [r["contenders"][0]["status"] for r in (one, two)] == ["ok", "ok"]
    times = [event_scaling.milliseconds(r) for r in (one, two)]
    assert one["efficiency"] == 1.0
    assert two["efficiency"] == pytest.approx(times[0] / times[1], abs=1e-4)
    assert record.read(path)["bars"] == []  # they are meant for GPUs
    assert path.with_suffix(".png").is_file()
    assert "weak scaling, 2 ranks, 400 neurons" in capsys.readouterr().out


def row(what: str, ranks: int, ms: float, neurons: int) -> dict[str, Any]:
    run = {"name": "events", "status": "ok", "wall_ms": {"median": ms}}
    sizes = {"neurons": neurons, "parameters": 1000 * neurons, "samples_per_s": 48e3 / ms}
    return {"what": what, "ranks": ranks, **sizes, "contenders": [run]}


def test_bars() -> None:
    rows = [row(SCALING, 1, 80.0, 49_400), row(SCALING, 4, 100.0, 197_600)]
    rows.append(row(LARGEST, 4, 500.0, 999_999))
    event_scaling.compare(rows)
    found = [(b["measured"], b["met"]) for b in event_scaling.bars(rows)]
    assert found == [(0.8, True), (197_600, True), (197_600_000, True), (999_999, False)]
    assert "efficiency" not in rows[2]
    failed = {"what": SCALING, "ranks": 4, "status": "failed", "reason": "exit code 1"}
    rows = [rows[0], failed]
    event_scaling.compare(rows)
    assert [b["measured"] for b in event_scaling.bars(rows)] == [None] * 3
    assert event_scaling.bars(rows[:1]) == []  # nothing is asked of GPUs that there are not
    assert event_scaling.progress(failed) == "4 ranks: failed, exit code 1"


def test_the_defaults_are_large_enough() -> None:
    args = event_scaling.arguments(["--device", "cuda"])
    layers = 4 * (args.neurons // args.width)
    assert layers * args.width >= event_scaling.BAR_NEURONS
    assert layers * args.width**2 >= event_scaling.BAR_PARAMETERS


def test_ranks_that_fail_leave_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(subprocess, "run", run)
    args = event_scaling.arguments(["--quick", "--device", "cpu"])
    found = event_scaling.started(args, 4, 300)
    assert found == {"ranks": 4, "status": "failed", "reason": "exit code 3"}
    (command,) = commands
    assert command[command.index("--nproc_per_node") + 1] == "4"
    assert command[command.index("--neurons") + 1] == "300"


def test_a_network_shared_out_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_scaling, "differences", lambda device: {"outputs": 1e-3})
    monkeypatch.setattr(event_scaling.dist, "all_reduce", lambda *arguments: None)
    with pytest.raises(AssertionError, match=r"outputs of a network shared out: 0\.001 from"):
        event_scaling.verify(torch.device("cpu"), Contender("events"), None)


def test_a_table(tmp_path: Path) -> None:
    rows = [row(SCALING, 1, 80.0, 49_400), row(SCALING, 2, 100.0, 98_800)]
    event_scaling.compare(rows)
    rows.append({"what": LARGEST, "ranks": 2, "status": "failed", "reason": "exit code 1"})
    settings = {"width": 3_800, "rate": 0.01, "T": 100, "batch": 48}
    made = result("event_scaling", rows, bars=[], settings=settings)
    text = event_tables.scaling(made, tmp_path / "event_scaling.json", tmp_path)
    assert "Layers of 3,800 neurons of which 1% fire, T = 100, batch 48:" in text
    assert "| weak scaling | 2 | 98,800 | 98,800,000 | 100 | 480 | 80% |" in text
    assert "| the largest | 2 | failed | – | – | – | – |" in text


def test_nothing_to_draw(tmp_path: Path) -> None:
    assert plots.weak_scaling({"rows": []}, tmp_path / "none.png") is None
