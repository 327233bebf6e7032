"""Start runs of the command in processes of their own, and compare their results."""

from __future__ import annotations

import csv
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

Spikefuse = Callable[..., int]
ROOT = Path(__file__).resolve().parents[2]
PLAIN = Path(__file__).parent / "programs" / "plain.py"
# Random shifts, spikes and order must not depend on how a batch is divided.
OPTIONS = shlex.split(
    "--model plain --batch-size 128 -T 4 --device cpu --encoding poisson --threshold 0.3"
)
SECONDS = 90.0


def start(count: int, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable]
    if count > 1:
        # Standalone runs choose a free port.
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
    return subprocess.Popen(
        [*command, str(PLAIN), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output
    return output


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)


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
