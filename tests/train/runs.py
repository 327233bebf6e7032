"""Runs of the command in several processes, and their results."""

from __future__ import annotations

import csv
import shlex
import subprocess
from pathlib import Path

import pytest
import torch

from tests import processes

PLAIN = Path(__file__).parent / "programs" / "plain.py"
# Random pixels, spikes and order must be the same however a batch is shared.
OPTIONS = shlex.split(
    "--model plain --batch-size 128 -T 4 --device cpu --encoding poisson --threshold 0.3"
)


def start(count: int, folder: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    """Start the command in one process, or in several by torchrun."""
    if count == 1:
        return processes.start(PLAIN, *arguments, folder=folder)
    return processes.torchrun(count, PLAIN, *arguments, folder=folder)


def rows(folder: Path) -> list[dict[str, float]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


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
