"""The first call, once with processes of its own and then with pretended ones."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import first_call, record


def test_the_second_process_finds_what_the_first_has_compiled(tmp_path: Path) -> None:
    command = f"--backend numba --neurons LIF --quick --out {tmp_path}"
    path = first_call.main(command.split())
    assert path is not None
    result = record.read(path)
    (row,) = result["rows"]
    assert (row["backend"], row["neuron"], row["status"]) == ("numba", "LIF", "ok"), row
    assert 0 < row["warm"]["median"] < row["cold"]["median"]
    assert result["bars"] == []  # a trial


Calls = list[dict[str, str]]


def pretend(monkeypatch: pytest.MonkeyPatch, done: Any) -> Calls:
    calls: Calls = []

    def fake(command: list[str], env: dict[str, str], **_: Any) -> Any:
        assert command[3:] == ["--child", "numba", "--neurons", "own"]
        calls.append(env)
        return done(len(calls))

    monkeypatch.setenv("SPIKEFUSE_REVISION", "0123456789abcdef")  # git is a process too
    monkeypatch.setenv("NUMBA_CACHE_DIR", "somewhere")
    monkeypatch.setattr(first_call.subprocess, "run", fake)
    return calls


def test_medians_and_bars(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def done(count: int) -> subprocess.CompletedProcess[str]:
        seconds = 3.0 + count if count % 2 else 0.1 * count
        line = json.dumps([{"neuron": "own", "backend_imported": False, "seconds": seconds}])
        return subprocess.CompletedProcess([], 0, f"a warning\n{line}\n", "")

    calls = pretend(monkeypatch, done)
    command = f"--backend numba --neurons own --repeats 3 --out {tmp_path}"
    path = first_call.main(command.split())
    assert path is not None
    (row,) = record.read(path)["rows"]
    assert row["cold"]["rounds"] == [4.0, 6.0, 8.0]
    assert row["warm"]["median"] == 0.4
    assert [(bar["measured"], bar["met"]) for bar in record.read(path)["bars"]] == [
        (6.0, False), (0.4, True)
    ]  # fmt: skip
    folders = [env["SPIKEFUSE_CACHE_DIR"] for env in calls]
    assert folders[0] == folders[1] != folders[2] == folders[3]
    assert all("NUMBA_CACHE_DIR" not in env and env["TRITON_CACHE_DIR"] for env in calls)


def test_a_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = subprocess.CompletedProcess([], 1, "", "Traceback\nValueError: no kernel\n")
    pretend(monkeypatch, lambda _: done)
    command = f"--backend numba --neurons own --out {tmp_path}"
    path = first_call.main(command.split())
    assert path is not None
    result = record.read(path)
    assert result["rows"] == [
        {"backend": "numba", "status": "failed", "reason": "exit code 1: ValueError: no kernel"}
    ]
    assert [(bar["measured"], bar["met"]) for bar in result["bars"]] == [(None, False)] * 2


def test_repeats_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        first_call.arguments(["--repeats", "-1"])
    assert "--repeats must be at least 1" in capsys.readouterr().err
