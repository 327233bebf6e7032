"""Runs of the command in several processes, and comparisons of the results of runs."""

from __future__ import annotations

import csv
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spikefuse import models
from spikefuse.train.cli import main
from tests import processes
from tests.train.programs import plain

PLAIN = Path(__file__).parent / "programs" / "plain.py"
# Random pixels, spikes and order must be the same however a batch is shared. Fusing takes each
# process seconds.
OPTIONS = shlex.split(
    "--model plain --batch-size 128 -T 4 --device cpu --encoding poisson --threshold 0.3 --no-fuse"
)


def start(count: int, folder: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    """Start the command in one process, or in several by torchrun."""
    if count == 1:
        return processes.start(PLAIN, *arguments, folder=folder)
    return processes.torchrun(count, PLAIN, *arguments, folder=folder)


def with_others(
    alone: Callable[..., int], folder: Path, *arguments: str, count: int = 2
) -> tuple[int, str]:
    """Run as torchrun would, with this process as the first of `count`.

    The others share one import of Lightning, which takes longer than a run.

    Returns:
        The exit code of this process, and the output of the others, which end with the same code.
    """
    context, port, others = processes.forkserver(), processes.free_port(), []
    with pytest.MonkeyPatch.context() as patch:
        for rank in range(1, count):
            job = processes.job(rank, count, port)
            others.append(context.Process(target=_other, args=(folder, job, arguments)))
            others[-1].start()
        job = processes.job(0, count, port)
        for name, value in job.items():
            patch.setenv(name, value)
        code = alone(*arguments)
    for other in others:
        other.join(processes.SECONDS)
    output = "".join(path.read_text() for path in sorted(folder.glob("output-*")))
    assert [other.exitcode for other in others] == [code] * len(others), output
    return code, output


def _other(folder: Path, job: dict[str, str], arguments: tuple[str, ...]) -> None:
    os.chdir(folder)
    os.environ.update(job)
    torch.set_num_threads(1)
    models.MODELS["plain"] = plain.plain
    with open(f"output-{job['RANK']}", "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(main(arguments))


def rows(folder: Path) -> list[dict[str, float]]:
    with (folder / "metrics.csv").open(newline="") as file:
        # A run that shares time has no rates, and leaves them empty.
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def assert_same_curve(one: Path, other: Path) -> None:
    a, b = rows(one), rows(other)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        for name in ("train_accuracy", "val_accuracy", "step"):
            assert x[name] == y[name]
        for name in ("train_loss", "val_loss"):
            assert x[name] == pytest.approx(y[name], rel=1e-6)
    left, right = (
        torch.load(run / "last.ckpt", weights_only=True)["state_dict"] for run in (one, other)
    )
    assert left.keys() == right.keys()
    for name, weights in left.items():
        torch.testing.assert_close(weights, right[name], rtol=1e-4, atol=1e-5)


def read_checkpoint(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def assert_same_run(one: Path, other: Path) -> None:
    """Compare weights, optimizer, counters and history, except speed and planned length."""
    for name in ("last.ckpt", "best.ckpt"):
        a, b = read_checkpoint(one / name), read_checkpoint(other / name)
        for row in a["spikefuse"]["history"] + b["spikefuse"]["history"]:
            for name in ("images_per_second", "data_wait"):
                row.pop(name)
        for checkpoint in (a, b):  # an extended run was to end earlier when it was saved
            checkpoint["spikefuse"]["config"].pop("epochs")
        keys = "state_dict", "optimizer_states", "spikefuse", "epoch", "global_step"
        average = ["current_model_state"] if "current_model_state" in a else []
        for key in (*keys, *average):
            assert_equal(a[key], b[key], f"{name} {key}")


def assert_equal(a: Any, b: Any, where: str) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_equal(a[key], b[key], f"{where} {key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, pair in enumerate(zip(a, b, strict=True)):
            assert_equal(*pair, f"{where} {i}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    else:
        assert a == b, where
