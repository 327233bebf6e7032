"""Training with shared time matches one process, and torchrun can restart it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from spikefuse.train import cli, run
from spikefuse.train.config import TrainConfig
from spikefuse.train.fields import ConfigError
from spikefuse.train.processes import Processes
from spikefuse.train.run_options import RunOptions
from tests.processes import finish, torchrun, wait_for
from tests.train.runs import OPTIONS, PLAIN, assert_same_curve, rows, with_others

Spikefuse = Callable[..., int]
SHARED = (*OPTIONS, "--time-ranks", "2")


def test_time_and_data_ranks_match_one_process_and_resume_on_fewer(
    alone: Spikefuse, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Four share data and time; two that share time resume, and then one.

    Two that share data are those of `test_averaged_weights_and_early_stopping...`.
    """
    assert alone("train", *OPTIONS, "--epochs", "3", "--out", "one") == 0
    capfd.readouterr()
    command = "train", *SHARED, "--data-ranks", "2", "--epochs", "1", "--out", "four"
    code, output = with_others(alone, tmp_path, *command, count=4)
    output += capfd.readouterr().out
    assert code == 0
    assert output.count("epoch 1/1") == output.count("test accuracy") == 1
    resume = ("train", "--resume", "four/last.ckpt", "--device", "cpu", "--epochs")
    assert with_others(alone, tmp_path, *resume, "2", "--time-ranks", "2")[0] == 0
    assert len(rows(tmp_path / "four")) == 2
    assert alone(*resume, "3") == 0
    assert_same_curve(tmp_path / "one", tmp_path / "four")


def test_checkpointed_training_with_shared_time_learns_as_one(
    alone: Spikefuse, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two processes then share the evaluation of the checkpoint."""
    assert alone("train", *OPTIONS, "--epochs", "2", "--out", "one") == 0
    command = "train", *SHARED, "--epochs", "1", "--memory", "checkpoint", "--out", "two"
    assert with_others(alone, tmp_path, *command)[0] == 0
    assert alone("train", "--resume", "two/last.ckpt", "--device", "cpu", "--epochs", "2") == 0
    assert_same_curve(tmp_path / "one", tmp_path / "two")
    evaluation = "eval", "two/best.ckpt", "--device", "cpu"
    capfd.readouterr()
    assert alone(*evaluation) == 0
    expected = capfd.readouterr().out
    code, output = with_others(alone, tmp_path, *evaluation)
    assert code == 0
    assert output + capfd.readouterr().out == expected


def test_torchrun_restarts_from_the_last_checkpoint(tmp_path: Path) -> None:
    command = PLAIN, "train", *SHARED, "--epochs", "3", "--out", "run"
    process = torchrun(2, "--max-restarts", "1", *command, folder=tmp_path)
    wait_for((tmp_path / "run" / "best.ckpt").exists, process)
    os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
    output = finish(process)
    # What had been done is not done again.
    assert output.count("epoch 1/3") == output.count("epoch 3/3") == 1
    assert [row["epoch"] for row in rows(tmp_path / "run")] == [1, 2, 3]


def test_restart_resumes_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resumed(*arguments: str) -> Path | None:
        parsed = cli.make_parser().parse_args(["train", *arguments])
        cli._resume_after_restart(parsed, "last.ckpt")
        return parsed.resume

    out = ("--out", str(tmp_path))
    assert resumed() is None
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    with pytest.raises(ConfigError, match="add --out DIR"):
        resumed()
    (tmp_path / "last.ckpt").touch()
    assert resumed(*out) is None  # the first start
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert resumed(*out) == tmp_path / "last.ckpt"
    assert resumed("--resume", "other.ckpt") == Path("other.ckpt")


@pytest.mark.parametrize(
    ("config", "place", "count", "message"),
    [
        ({}, {"time_ranks": 2, "data_ranks": 2}, 2, "do not match 2 processes"),
        ({}, {"time_ranks": 3}, 4, "time_ranks 3 and data_ranks unset do not match 4"),
        ({}, {"time_ranks": 0}, 2, "time_ranks is 0: expected a whole number of at least 1"),
        ({"num_steps": 3}, {"time_ranks": 4}, 4, "num_steps is 3: expected at least time_ranks"),
        (
            {"tbptt": 2},
            {"time_ranks": 2},
            2,
            "tbptt is given, but needs whole sequences",
        ),
        ({"rate_penalty": 0.1}, {"time_ranks": 2}, 2, "rate_penalty is given, but needs whole seq"),
        (
            {"dataset": "shd", "model": "event-mlp"},
            {"time_ranks": 2},
            2,
            "time_ranks is given, but the model computes on events: remove it",
        ),
        (
            {"dataset": "shd", "model": "recurrent"},
            {"time_ranks": 2},
            2,
            "time_ranks is given, but the layers of the model feed back: remove it",
        ),
    ],
)
def test_invalid_parallelism(config: dict, place: dict, count: int, message: str) -> None:
    processes = Processes(0, count, time=max(place["time_ranks"], 1))
    with pytest.raises(ConfigError, match=message):
        run._check_processes(TrainConfig(**config), RunOptions(**place), processes)


def test_shares_of_data_and_time() -> None:
    ranks = [Processes(rank, 4, time=2) for rank in range(4)]
    assert [(p.share(10), p.steps(5)) for p in ranks] == [
        (slice(0, 5), slice(0, 2)), (slice(0, 5), slice(2, 5)),
        (slice(5, 10), slice(0, 2)), (slice(5, 10), slice(2, 5)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("same", "split"),
    [(["--rate-penalty", "0.1", "--logger", "csv"], []), ([], ["--time-ranks", "2"])],
    ids=["data", "time"],
)
def test_averaged_weights_and_early_stopping_in_several_processes(
    alone: Spikefuse, tmp_path: Path, same: list[str], split: list[str]
) -> None:
    options = *OPTIONS, "--ema", "0.8", "--patience", "9", "--weight-decay", "0.01", *same
    command = "train", *options, "--epochs", "2", "--out"
    assert alone(*command, "one") == 0
    assert with_others(alone, tmp_path, *command, "two", *split)[0] == 0
    assert_same_curve(tmp_path / "one", tmp_path / "two")
