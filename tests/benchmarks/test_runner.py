"""The runner: a wrong result gets no time, everybody takes turns, a result is written whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import record, runner
from benchmarks.runner import Contender, Copy, CpuClock, Settings, measure

QUICK = Settings(rounds=4, slot_ms=0.0, warmup=1)


class Steady:
    """A clock on which each run takes as long as it returns."""

    def __init__(self) -> None:
        self.turns: list[float] = []

    def slot(self, run: Any, repetitions: int) -> dict[str, float]:
        taken = float(run())
        self.turns.append(taken)
        return {"wall_ms": taken, "device_ms": taken / 2}

    def memory(self, contender: Contender) -> dict[str, int]:
        return {"peak_bytes": 7}

    def bandwidth_kind(self) -> str:
        return "device_ms"


def expect_positive(contender: Contender, result: Any) -> None:
    assert result > 0, f"{result} is not positive"


def failing() -> float:
    raise RuntimeError("no such kernel\nand more")


def test_only_right_results_get_a_time() -> None:
    contenders = [
        Contender("right", lambda: 2.0, note="made by hand"),
        Contender("wrong", lambda: -1.0),
        Contender("broken", failing),
        Contender("absent", unavailable="not installed"),
    ]
    found = measure(contenders, [], expect_positive, Steady(), 100, QUICK)["contenders"]
    right, *others = found
    assert right["status"] == "ok"
    assert right["note"] == "made by hand"
    assert right["wall_ms"]["median"] == 2.0
    assert right["peak_bytes"] == 7
    assert others == [
        {"name": "wrong", "status": "wrong", "reason": "-1.0 is not positive"},
        {"name": "broken", "status": "failed", "reason": "RuntimeError: no such kernel"},
        {"name": "absent", "status": "unavailable", "reason": "not installed"},
    ]


def test_contenders_and_copies_take_turns() -> None:
    clock = Steady()
    contenders = [Contender("a", lambda: 1.0), Contender("b", lambda: 2.0)]
    copies = [Copy("copy", lambda: 3.0, 10)]
    settings = replace(QUICK, rounds=20)
    measure(contenders, copies, expect_positive, clock, 10, settings)
    turns = clock.turns[-3 * settings.rounds :]
    rounds = [tuple(turns[i : i + 3]) for i in range(0, len(turns), 3)]
    assert {tuple(sorted(order)) for order in rounds} == {(1.0, 2.0, 3.0)}
    assert len(set(rounds)) == 6  # all orders


def test_fractions_are_of_the_first_copy() -> None:
    copies = [Copy("copy", lambda: 4.0, 8_000_000), Copy("other", lambda: 1.0, 8_000_000)]
    ours = [Contender("ours", lambda: 16.0)]
    found = measure(ours, copies, expect_positive, Steady(), 4_000_000, QUICK)
    assert [c["gb_per_s"] for c in found["copies"]] == [4.0, 16.0]  # 8 MB in 2 ms and in 0.5 ms
    assert found["contenders"][0]["fraction"] == {"wall_ms": 1 / 16, "device_ms": 1 / 8}


def test_repetitions_fill_a_slot() -> None:
    calls: list[int] = []
    clock = CpuClock()
    settings = Settings(rounds=1, slot_ms=1e6, warmup=1, max_repetitions=13)
    work = Contender("work", lambda: calls.append(1) or 1.0)
    measure([work], [], expect_positive, clock, 1, settings)
    assert len(calls) == 1 + 1 + 13  # verified, estimated, timed


def test_memory_is_poisoned_before_each_verification() -> None:
    events: list[str] = []
    contenders = [Contender(n, lambda n=n: events.append(n) or 1.0) for n in "ab"]

    def note(*_: Any) -> None:
        events.append("before")

    measure(contenders, [], expect_positive, Steady(), 1, QUICK, note)
    assert events[:4] == ["before", "a", "before", "b"]


def test_spread() -> None:
    found = runner.spread([float(v) for v in range(11)])
    assert (found["median"], found["p10"], found["p90"]) == (5.0, 1.0, 9.0)
    assert found["rounds"] == [float(v) for v in range(11)]
    assert runner.spread([3.0])["p90"] == 3.0


def test_a_result_tells_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPIKEFUSE_REVISION", "abc123-dirty")
    found = record.document("a_benchmark", torch.device("cpu"), False, {"T": 4})
    assert (found["revision"], found["dirty"]) == ("abc123", True)
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["cpu"]
    assert {"python", "torch", "numba", "spikefuse"} <= found["versions"].keys()
    assert found["date"].endswith("+00:00")


def test_the_revision_may_be_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SPIKEFUSE_REVISION", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(record, "ROOT", tmp_path)
    assert record.revision() == {"revision": None, "dirty": None}


def test_a_result_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    result = {"schema": 1, "benchmark": "b", "machine": {"cpu": "A (R) 9", "cores": 2}, "rows": []}
    path = record.write(tmp_path, result)
    assert path.name == "b-a-r-9-2-cores.json"
    assert record.read(path) == result
    with pytest.raises(TypeError):
        record.write(tmp_path, result | {"rows": [object()]})
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert record.read(path) == result


def test_other_schemas_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "b-x.json"
    path.write_text(json.dumps({"schema": 99}))
    with pytest.raises(ValueError, match="not a result of schema 1"):
        record.read(path)
