"""The training benchmark, with a command that only pretends to train."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record, tables, training
from spikefuse.train.cli import make_parser
from spikefuse.train.config import TrainConfig

Calls = list[list[str]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The commands that were to run; each writes a result, of 0.9 + seed / 20."""
    monkeypatch.setenv("SPIKEFUSE_REVISION", "0123456789abcdef")
    found: Calls = []

    def fake(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        found.append(command)
        read = vars(make_parser().parse_args(command[3:]))
        names = TrainConfig().to_dict().keys() & read.keys()
        config = TrainConfig(**{name: read[name] for name in names})
        result = dict.fromkeys(training.FACTS, 1) | {
            "test_accuracy": 0.9 + config.seed / 20,
            "config": config.to_dict(),
        }
        read["out"].mkdir()
        (read["out"] / "result.json").write_text(json.dumps(result))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(training.subprocess, "run", fake)
    return found


def test_digits_is_the_command_as_it_is(
    calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = training.main(["digits", "--device", "cpu", "--out", str(tmp_path)])
    for seed, command in enumerate(calls):
        start = [sys.executable, "-m", "spikefuse", "train", "--device", "cpu"]
        assert command[:-1] == [*start, "--seed", str(seed), "--out"]
        assert not Path(command[-1]).exists()  # taken away
    result = record.read(path)
    assert path.name == f"training_digits-{record.slug(result['machine'])}.json"
    assert (result["quick"], result["revision"]) == (False, "0123456789abcdef")
    assert [row["seed"] for row in result["rows"]] == [0, 1, 2]
    assert all(0 <= row["seconds"] < 60 for row in result["rows"])
    assert [(bar["what"], bar["met"]) for bar in result["bars"]] == [
        ("seed 0: seconds", True),
        ("seed 0: held-out accuracy", False),
        ("seed 1: seconds", True),
        ("seed 1: held-out accuracy", False),
        ("seed 2: seconds", True),
        ("seed 2: held-out accuracy", True),
    ]
    assert "MISSED seed 0: held-out accuracy: 0.9, bar 0.97" in capsys.readouterr().out
    text = "<!-- generated:training begin --><!-- generated:training end -->"
    assert "| digits | conv, lif, " in tables.filled(text, tmp_path, tmp_path)


def test_mnist(calls: Calls, tmp_path: Path) -> None:
    arguments = ["mnist", "--device", "cpu", "--seeds", "2", "--data-dir", "images"]
    result = record.read(training.main([*arguments, "--out", str(tmp_path)]))
    assert len(calls) == 1
    assert calls[0][calls[0].index("--data-dir") + 1] == str(Path("images").resolve())
    expected = {"dataset": "mnist", "model": "resnet18", "num_steps": 32, "encoding": "poisson"}
    expected |= {"epochs": 5, "batch_size": 100, "shift": 0}
    assert result["settings"]["config"].items() >= expected.items()
    assert [(bar["what"], bar["bar"]) for bar in result["bars"]] == [
        ("seed 2: held-out accuracy", 0.98)
    ]


@pytest.mark.parametrize("dataset", training.TASKS)
@pytest.mark.parametrize("option", [["--quick"], ["--epochs", "3"]])
def test_other_runs_are_not_judged(
    calls: Calls, tmp_path: Path, dataset: str, option: list[str]
) -> None:
    arguments = [dataset, *option, "--device", "cpu", "--out", str(tmp_path)]
    result = record.read(training.main(arguments))
    assert result["bars"] == []
    assert result["quick"] == (option == ["--quick"])
    assert result["settings"]["config"]["epochs"] == (1 if result["quick"] else 3)


def test_a_run_that_fails_ends_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = subprocess.CompletedProcess([], 2)
    monkeypatch.setenv("SPIKEFUSE_REVISION", "0")
    monkeypatch.setattr(training.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(SystemExit, match="seed 0 ended with exit code 2"):
        training.main(["digits", "--device", "cpu", "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", [["--seeds", "-1"], ["--epochs", "0"]])
def test_numbers_are_checked(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        training.arguments(["digits", *wrong])
    assert stopped.value.code == 2
    assert "must be at least" in capsys.readouterr().err
