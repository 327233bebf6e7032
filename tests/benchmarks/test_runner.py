"""The runner: only correct results are timed, contenders take turns, results are written whole."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import record, runner
from benchmarks.runner import Contender, Copy, CpuClock, Timing, measure


class FakeClock:
    """Each run takes as long as the number that it returns."""

    bandwidth_kind = "device_ms"

    def __init__(self) -> None:
        self.turns: list[float] = []

    def turn(self, run: Any, repetitions: int) -> dict[str, float]:
        taken = float(run())
        self.turns.append(taken)
        return {"wall_ms": taken, "device_ms": taken / 2}

    def memory(self, contender: Contender) -> dict[str, int]:
        return {"peak_bytes": 7}


TIMING = Timing(FakeClock(), rounds=4, turn_ms=0.0, warmup=1)


def expect_positive(contender: Contender, result: Any) -> None:
    assert result > 0, f"{result} is not positive"


def failing() -> float:
    raise RuntimeError("no such kernel\nand more")


def test_only_correct_results_are_timed() -> None:
    contenders = [
        Contender("right", lambda: 2.0, note="made by hand"),
        Contender("wrong", lambda: -1.0),
        Contender("broken", failing),
        Contender("absent", unavailable="not installed"),
    ]
    right, *others = measure(contenders, expect_positive, TIMING)["contenders"]
    assert (right["status"], right["note"], right["peak_bytes"]) == ("ok", "made by hand", 7)
    assert right["wall_ms"]["median"] == 2.0
    assert others == [
        {"name": "wrong", "status": "wrong", "reason": "-1.0 is not positive"},
        {"name": "broken", "status": "failed", "reason": "RuntimeError: no such kernel"},
        {"name": "absent", "status": "unavailable", "reason": "not installed"},
    ]


def test_contenders_and_a_copy_take_turns() -> None:
    contenders = [Contender("a", lambda: 1.0), Contender("b", lambda: 16.0)]
    copy = Copy("copy", lambda: 4.0, num_bytes=8_000_000)
    timing = replace(TIMING, rounds=20, copy=copy)
    found = measure(contenders, expect_positive, timing, 4_000_000)
    turns = timing.clock.turns[-60:]  # type: ignore[attr-defined]
    rounds = [tuple(turns[i : i + 3]) for i in range(0, 60, 3)]
    assert {tuple(sorted(order)) for order in rounds} == {(1.0, 4.0, 16.0)}
    assert len(set(rounds)) == 6  # all orders
    assert found["copies"][0]["gb_per_s"] == 4.0  # 8 MB in 2 ms
    assert found["contenders"][1]["fraction"] == {"wall_ms": 1 / 16, "device_ms": 1 / 8}


def test_repetitions_fill_a_turn() -> None:
    calls: list[int] = []
    timing = Timing(CpuClock(), rounds=1, turn_ms=1e6, warmup=1, max_repetitions=13)
    measure([Contender("work", lambda: calls.append(1) or 1.0)], expect_positive, timing)
    assert len(calls) == 1 + 1 + 13  # verified, estimated, timed
    found = runner.spread([float(v) for v in range(11)])
    assert (found["median"], found["p10"], found["p90"]) == (5.0, 1.0, 9.0)
    assert found["rounds"] == [float(v) for v in range(11)]
    assert runner.spread([3.0])["p90"] == 3.0


def test_failed_cases_are_left_out(tmp_path: Path) -> None:
    args = argparse.Namespace(device="cpu", name="b", quick=True, out=tmp_path)
    cases = (("right", lambda: {"contenders": []}), ("broken", failing))
    result = record.read(runner.run_cases(args, cases))
    assert [row["row"] for row in result["rows"]] == ["right"]
    assert result["left_out"] == [{"row": "broken", "reason": "RuntimeError: no such kernel"}]


def test_a_result_has_its_origin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPIKEFUSE_REVISION", "abc123-dirty")
    found = record.document("a_benchmark", torch.device("cpu"), False, {"T": 4})
    assert (found["revision"], found["dirty"]) == ("abc123", True)
    assert {"python", "torch", "numba", "spikefuse"} <= found["versions"].keys()
    monkeypatch.delenv("SPIKEFUSE_REVISION")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(record, "ROOT", tmp_path)
    assert record.revision() == {"revision": None, "dirty": None}


def test_a_result_is_written_and_read(tmp_path: Path) -> None:
    result = {"schema": 1, "benchmark": "b", "machine": {"cpu": "A (R) 9", "cores": 2}, "rows": []}
    path = record.write(tmp_path, result)
    assert path.name == "b-a-r-9-2-cores.json"
    assert record.read(path) == result
    path.write_text(json.dumps({"schema": 99}))
    with pytest.raises(ValueError, match="not a result of schema 1"):
        record.read(path)


def test_rebuilt_pages_do_not_change_the_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPIKEFUSE_REVISION", raising=False)
    monkeypatch.setattr(record, "ROOT", tmp_path)
    for page in (*record.PAGES, "code.py"):
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text("before")
    author = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    for command in (("init",), ("add", "."), (*author, "commit", "--message", "First")):
        assert record._git(*command) is not None
    for page in record.PAGES:
        (tmp_path / page).write_text("after")
    assert record.revision()["dirty"] is False
    (tmp_path / "code.py").write_text("after")
    assert record.revision()["dirty"] is True


@pytest.mark.parametrize("rounds", ["0", "-1"])
def test_too_few_rounds_are_refused(rounds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runner.parse(runner.make_parser("trial", ""), ["--rounds", rounds])
    assert "--rounds must be at least 1" in capsys.readouterr().err
