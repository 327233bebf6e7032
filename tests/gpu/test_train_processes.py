"""Two processes with a GPU each learn as one does, and end if one of them ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.processes import ended, finish, wait_for
from tests.train.runs import OPTIONS, rows, start

ON_GPUS = [*OPTIONS, "--device", "cuda"]  # the last one given counts

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("option", ["--no-cuda-graph", "--cuda-graph"])
def test_two_gpus_learn_as_one(tmp_path: Path, option: str) -> None:
    """Up to rounding, which flips spikes: cuBLAS adds in another order for half a batch."""
    for count, name in ((1, "one"), (2, "two")):
        finish(start(count, tmp_path, "train", *ON_GPUS, option, "--epochs", "3", "--out", name))
    one, two = rows(tmp_path / "one"), rows(tmp_path / "two")
    assert len(one) == len(two) == 3
    for a, b in zip(one, two, strict=True):
        assert a["step"] == b["step"]
        for loss in ("train_loss", "val_loss"):
            assert a[loss] == pytest.approx(b[loss], rel=3e-3)
    assert one[-1]["train_loss"] < 0.97 * one[0]["train_loss"]


def test_a_killed_process_ends_the_run(tmp_path: Path) -> None:
    process = start(2, tmp_path, "train", *ON_GPUS, "--epochs", "9999", "--out", "run")
    wait_for((tmp_path / "run" / "best.ckpt").exists, process)
    os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
    output = ended(process)
    assert process.returncode != 0
    assert "another process has ended, so the run cannot continue; saved run/last.ckpt" in output
    finish(start(1, tmp_path, "eval", "run/last.ckpt"))
