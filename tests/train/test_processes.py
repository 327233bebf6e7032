"""Shares of processes in data and time, and two of them that stop when one dies."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spikefuse.train.processes import Processes
from spikefuse.train.tasks import Task, Totals
from tests.processes import SECONDS, ended, wait_for
from tests.train.runs import OPTIONS, start, with_others

Spikefuse = Callable[..., int]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_run(
    alone: Spikefuse, tmp_path: Path, capsys: pytest.CaptureFixture[str], victim: int
) -> None:
    process = start(2, tmp_path, "train", *OPTIONS, "--epochs", "9999", "--out", "run")
    wait_for((tmp_path / "run" / "best.ckpt").exists, process)
    os.kill(int((tmp_path / f"pid-{victim}").read_text()), signal.SIGKILL)
    killed = time.monotonic()
    output = ended(process)
    assert time.monotonic() - killed < 30
    assert process.returncode != 0
    message = f"rank {1 - victim}: another process has ended, so the run cannot continue; saved"
    assert f"{message} run/last.ckpt: continue with --resume run/last.ckpt" in output
    done = len(torch.load(tmp_path / "run" / "last.ckpt")["spikefuse"]["history"])
    arguments = ("train", "--resume", "run/last.ckpt", "--device", "cpu", "--epochs", str(done + 1))
    assert alone(*arguments) == 0
    assert f"epoch {done + 1}/{done + 1}" in capsys.readouterr().out


def test_sigterm_saves_with_several_processes(tmp_path: Path) -> None:
    process = start(2, tmp_path, "train", *OPTIONS, "--epochs", "9999", "--out", "run")
    wait_for((tmp_path / "run" / "best.ckpt").exists, process)
    process.send_signal(signal.SIGTERM)
    output = ended(process)
    assert "stopped; saved run/last.ckpt; resume with:" in output
    assert "--nproc_per_node 2 -m spikefuse train --resume run/last.ckpt" in output
    assert not list(tmp_path.rglob("*.partial"))


def test_user_error_is_reported_once(
    alone: Spikefuse, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, output = with_others(alone, tmp_path, "train", *OPTIONS, "--batch-size", "127")
    output += capfd.readouterr().err
    assert code == 2
    assert output.count("--batch-size is 127: expected a multiple of the 2 processes") == 1
    assert not (tmp_path / "runs").exists()


def test_shares_partition_the_batch() -> None:
    for count, total in ((1, 5), (3, 128), (4, 2)):
        taken = [list(range(total))[Processes(rank, count).share(total)] for rank in range(count)]
        assert list(itertools.chain(*taken)) == list(range(total))
        assert max(map(len, taken)) - min(map(len, taken)) <= 1


def test_single_process_communicates_nothing() -> None:
    alone, values = Processes(), torch.ones(2)
    assert alone.main
    assert alone.sum(values) is values
    assert alone.maximum(-2) == -2
    assert alone.broadcast("x") == "x"
    totals = Totals(Task("classification", "cross-entropy", "mean", 3))
    assert totals.reduced(alone, torch.device("cpu")) is totals


# A main thread that waits in C, where no signal handler of Python's runs.
STUCK = """
import ctypes, pathlib
from spikefuse.train import signals
from spikefuse.train.processes import Processes
signals.PATIENCE_SECONDS = 0.5
with signals.SignalHandler(pathlib.Path("last.ckpt"), Processes(0, 2)):
    lock, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(lock)
    print("waiting", flush=True)
    libc.pthread_mutex_lock(lock)
"""


def test_blocked_process_exits_after_a_signal() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert (
        "rank 0: another process has ended, so the run cannot continue; nothing was saved" in errors
    )


def test_shares_of_data_and_time() -> None:
    ranks = [Processes(rank, 4, time=2) for rank in range(4)]
    assert [(p.share(10), p.steps(5)) for p in ranks] == [
        (slice(0, 5), slice(0, 2)), (slice(0, 5), slice(2, 5)),
        (slice(5, 10), slice(0, 2)), (slice(5, 10), slice(2, 5)),
    ]  # fmt: skip
