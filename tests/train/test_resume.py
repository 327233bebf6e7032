"""A resumed run ends bit for bit where an uninterrupted one does."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spikefuse.train import callbacks, predict
from spikefuse.train.checkpoint import best_epoch
from spikefuse.train.cli import main
from spikefuse.train.signals import SignalHandler
from spikefuse.train.training_module import TrainingModule
from tests.train.runs import assert_same_run, read_checkpoint

Spikefuse = Callable[..., int]
STEPS = 10  # per epoch
POISSON = shlex.split("--encoding poisson --model mlp --neuron plif")


@pytest.fixture
def four(small: list[str]) -> list[str]:
    return [*small, "--epochs", "4"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, small: list[str]) -> Path:
    """An uninterrupted run of 4 epochs."""
    directory = tmp_path_factory.mktemp("straight")
    arguments = [*small, "--epochs", "4", *POISSON, "--out", str(directory)]
    assert main(["train", *arguments]) == 0
    return directory


def interrupt(
    monkeypatch: pytest.MonkeyPatch,
    hook: str,
    call: int,
    times: int = 1,
    signum: int = signal.SIGINT,
) -> None:
    """Send a signal to this process when the `call`-th call of a Lightning hook begins."""
    original, calls = getattr(TrainingModule, hook), iter(range(10**6))

    def wrapped(self: TrainingModule, *arguments: Any) -> Any:
        if next(calls) == call:
            for _ in range(times):
                signal.raise_signal(signum)
        return original(self, *arguments)

    monkeypatch.setattr(TrainingModule, hook, wrapped)


def test_two_epochs_twice_equal_four(
    spikefuse: Spikefuse, tmp_path: Path, small: list[str], four: list[str]
) -> None:
    assert spikefuse("train", *four, "--out", "straight") == 0
    assert spikefuse("train", *small, "--out", "halves") == 0
    assert spikefuse("train", "--resume", "halves/last.ckpt", "--epochs", "4") == 0
    assert_same_run(tmp_path / "straight", tmp_path / "halves")


@pytest.mark.usefixtures("two_threads")
def test_with_several_threads(
    spikefuse: Spikefuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: list[str]
) -> None:
    monkeypatch.setattr(predict, "VALUES_PER_THREAD", 1)  # as many threads as there are
    options = [*small, "--batch-size", "400"]
    assert spikefuse("train", *options, "--out", "straight") == 0
    assert spikefuse("train", *options, "--epochs", "1", "--out", "halves") == 0
    assert spikefuse("train", "--resume", "halves/last.ckpt", "--epochs", "2") == 0
    assert_same_run(tmp_path / "straight", tmp_path / "halves")


@pytest.mark.parametrize(
    ("hook", "call"),
    [
        ("training_step", 0),
        ("training_step", 14),
        ("training_step", 2 * STEPS - 1),  # the last of an epoch: its validation comes first
        ("training_step", 2 * STEPS),
        ("training_step", 4 * STEPS - 1),
        ("validation_step", 2),
    ],
)
def test_interrupted_anywhere(
    spikefuse: Spikefuse,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    four: list[str],
    straight: Path,
    hook: str,
    call: int,
) -> None:
    with monkeypatch.context() as patch:
        interrupt(patch, hook, call)
        assert spikefuse("train", *four, *POISSON, "--out", "stopped") == 130
    assert "train --resume stopped/last.ckpt" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.partial"))
    assert spikefuse("train", "--resume", "stopped/last.ckpt") == 0
    assert_same_run(straight, tmp_path / "stopped")
    table = (tmp_path / "stopped" / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[:2] for line in table[1:]] == [
        [str(n), str(n * STEPS)] for n in (1, 2, 3, 4)
    ]


def test_conv_interrupted_twice_with_sgd(
    spikefuse: Spikefuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, four: list[str]
) -> None:
    options = [*four, "--optimizer", "sgd", "--lr", "0.05", "--neuron", "alif"]
    assert spikefuse("train", *options, "--out", "straight") == 0
    arguments = [*options, "--out", "stopped"]
    for call in (13, 9):
        with monkeypatch.context() as patch:
            interrupt(patch, "training_step", call)
            assert spikefuse("train", *arguments) == 130
        arguments = ["--resume", "stopped/last.ckpt"]
    assert spikefuse("train", *arguments) == 0
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")


def test_every_training_feature_interrupted(
    spikefuse: Spikefuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, four: list[str]
) -> None:
    features = shlex.split(
        "--model mlp --optimizer adamw --weight-decay 0.01 --schedule cosine --warmup 1.5 --clip 1 "
        "--label-smoothing 0.1 --loss every --accumulate 2 --tbptt 2 -T 5 --flip --ema 0.9 "
        "--patience 3 --rate-penalty 0.1 --trivial-augment --cutout 3 --erase 0.5 --mixup 0.2 "
        "--cutmix 1"
    )
    assert spikefuse("train", *four, *features, "--out", "straight") == 0
    with monkeypatch.context() as patch:
        interrupt(patch, "training_step", 14)
        assert spikefuse("train", *four, *features, "--out", "stopped") == 130
    assert spikefuse("train", "--resume", "stopped/last.ckpt") == 0
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")
    rate = read_checkpoint(tmp_path / "straight" / "last.ckpt")["optimizer_states"][0]
    assert rate["param_groups"][0]["lr"] < 1e-5


def test_saved_within_a_long_epoch(
    spikefuse: Spikefuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: list[str]
) -> None:
    """Checkpoints within an epoch need no signal, and resume bit for bit."""
    options = [*small, *POISSON]
    assert spikefuse("train", *options, "--out", "straight") == 0
    with monkeypatch.context() as patch:
        patch.setattr(callbacks, "SAVE_SECONDS", 0.0)
        interrupt(patch, "training_step", 13, times=2)
        assert spikefuse("train", *options, "--out", "broken") == 130
    assert read_checkpoint(tmp_path / "broken" / "last.ckpt")["global_step"] == 13
    assert spikefuse("train", "--resume", "broken/last.ckpt") == 0
    assert_same_run(tmp_path / "straight", tmp_path / "broken")


def test_second_ctrl_c_stops_immediately(
    spikefuse: Spikefuse,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    small: list[str],
) -> None:
    before = signal.getsignal(signal.SIGINT)  # ignored in a background process
    interrupt(monkeypatch, "training_step", 3, times=2)
    assert spikefuse("train", *small, "--out", "stopped") == 130
    assert "stopped before anything was saved" in capsys.readouterr().err
    assert not (tmp_path / "stopped").exists()
    assert signal.getsignal(signal.SIGINT) is before


def test_sigterm_saves_too(
    spikefuse: Spikefuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: list[str]
) -> None:
    interrupt(monkeypatch, "training_step", 3, signum=signal.SIGTERM)
    assert spikefuse("train", *small, "--out", "stopped") == 128 + signal.SIGTERM
    assert read_checkpoint(tmp_path / "stopped" / "last.ckpt")["global_step"] == 4
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("name", ["best.ckpt", "last.ckpt"])
def test_stopped_between_writing_two_files(
    spikefuse: Spikefuse,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    four: list[str],
    straight: Path,
    name: str,
) -> None:
    """Wherever saving is interrupted, best.ckpt is never behind last.ckpt."""
    original, found = callbacks.replacing, []

    @contextlib.contextmanager
    def stops(path: Path) -> Iterator[Path]:
        with original(path) as temporary:
            yield temporary
            if path.name == name:
                found.append(path)
                if len(found) == 2:
                    raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(callbacks, "replacing", stops)
        with pytest.raises(RuntimeError, match="power cut"):
            spikefuse("train", *four, *POISSON, "--out", "stopped")
    last, best = (read_checkpoint(tmp_path / "stopped" / n) for n in ("last.ckpt", "best.ckpt"))
    history = last["spikefuse"]["history"]
    assert len(best["spikefuse"]["history"]) >= best_epoch(history)["epoch"]
    assert spikefuse("train", "--resume", "stopped/last.ckpt") == 0
    assert_same_run(straight, tmp_path / "stopped")


def test_cosine_run_cannot_be_extended(
    spikefuse: Spikefuse, capsys: pytest.CaptureFixture[str], small: list[str]
) -> None:
    options = [*small, "--model", "mlp", "--schedule", "cosine", "--out", "run"]
    assert spikefuse("train", *options) == 0
    capsys.readouterr()
    assert spikefuse("train", "--resume", "run/last.ckpt", "--epochs", "3") == 2
    assert "epochs is 3, but run/last.ckpt was trained with 2" in capsys.readouterr().err


def test_best_checkpoint_of_another_run(
    spikefuse: Spikefuse, tmp_path: Path, capsys: pytest.CaptureFixture[str], small: list[str]
) -> None:
    options = [*small, "--model", "mlp"]
    assert spikefuse("train", *options, "--seed", "1", "--lr", "1e-9", "--out", "other") == 0
    assert spikefuse("train", *options, "--out", "run") == 0
    shutil.copyfile(tmp_path / "other" / "best.ckpt", tmp_path / "run" / "best.ckpt")
    capsys.readouterr()
    assert spikefuse("train", "--resume", "run/last.ckpt") == 2
    errors = capsys.readouterr().err
    assert "run/best.ckpt is not from epoch 2, the best of this run" in errors
    assert errors.count("\n") == 1


def test_first_ctrl_c_prints_a_message(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with SignalHandler(tmp_path / "last.ckpt") as handler:
        monkeypatch.setattr("builtins.print", None)  # of no use within a signal handler
        signal.raise_signal(signal.SIGINT)
        assert handler.requested == signal.SIGINT
    message = "\nfinishing this step, then saving; repeat to stop immediately\n"
    assert capfd.readouterr().err == message


def test_interrupted_while_testing(
    spikefuse: Spikefuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: list[str]
) -> None:
    with monkeypatch.context() as patch:
        interrupt(patch, "test_step", 1)
        assert spikefuse("train", *small, "--out", "stopped") == 130
    assert not (tmp_path / "stopped" / "result.json").exists()
    assert spikefuse("train", "--resume", "stopped/last.ckpt") == 0
    assert (tmp_path / "stopped" / "result.json").exists()


def test_the_printed_command_resumes(
    spikefuse: Spikefuse, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A real process, Ctrl-C, and the command that it prints."""
    program = [sys.executable, "-W", "error", "-m", "spikefuse"]
    with subprocess.Popen(
        [*program, "train", *small, "--epochs", "40", "--model", "mlp"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        while "epoch  2" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    command = shlex.split(errors.splitlines()[-1])
    last = Path("runs") / "digits-mlp-1" / "last.ckpt"
    assert command[:2] + command[3:] == [
        *(sys.executable, "-m"),
        *("train", "--resume", str(last), "--device", "cpu"),
    ]
    done = len(read_checkpoint(tmp_path / last)["spikefuse"]["history"])
    assert spikefuse(*command[3:], "--epochs", str(done + 1)) == 0
    assert re.search(rf"^epoch +{done + 1}/{done + 1} ", capsys.readouterr().out, re.M)
