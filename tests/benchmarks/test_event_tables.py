"""The tables of networks on events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import event_tables
from benchmarks.event_networks import DENSE, EVENTS, LOOP
from tests.benchmarks.test_tables import result


def row(rate: float, flips: int, error: float) -> dict[str, Any]:
    return {
        "case": "shd",
        "neurons": 2940,
        "rate": rate,
        "samples_per_s": {DENSE: 100.0, EVENTS: 850.0},
        "times_dense": {DENSE: 1.0, EVENTS: 8.5},
        "checks": {EVENTS: {"sites": 1_000_000, "flips": flips, "errors": {"a": error, "b": 0.0}}},
    }


def test_training(tmp_path: Path) -> None:
    rows = [row(0.005, 1, 2e-6), row(0.02, 2, 1e-6)]
    fine = {"name": "events", "status": "ok", "wall_ms": {"median": 0.05}}
    streaming = {"neurons": 47_070, "rate": 0.0101, "contenders": [fine, {"status": "wrong"}]}
    made = result("events", rows, bars=[], streaming=streaming)
    text = event_tables.events(made, tmp_path / "events.json", tmp_path)
    assert "| shd | 2,940 | 0.5% | 100 | 850 | 8.5× |" in text
    assert LOOP not in text
    assert "Of 2,000,000 spikes on events 3 differ" in text
    assert "no gradient by more than 2e-06 of its norm" in text
    assert "47,070 neurons of which 1.01% fire, microseconds: events 50.0." in text
    assert "![" not in text
    (tmp_path / "events.png").touch()
    text = event_tables.events(made, tmp_path / "events.json", tmp_path)
    assert "(events.png)" in text


def test_accuracy(tmp_path: Path) -> None:
    rows = [
        {"name": name, "best": 0.8 + seed / 100, "epochs_to_best": 7 + seed, "last_epoch": last}
        for seed in (0, 1)
        for name, last in (("events", {"activity_0": 0.07, "activity_1": 0.2}), ("dense", {}))
    ]
    settings = {"data": "shd", "hidden": [256, 128], "epochs": 15, "capacity": 0.3}
    made = result("event_accuracy", rows, bars=[], settings=settings)
    text = event_tables.accuracy(made, tmp_path / "event_accuracy.json", tmp_path)
    assert "| events | 80.0%, 81.0% | 7, 8 | 7% and 20%, 7% and 20% |" in text
    assert "| dense | 80.0%, 81.0% | 7, 8 | –, – |" in text
    assert "hidden layers of 256 and 128, 15 epochs, capacity 0.3:" in text
