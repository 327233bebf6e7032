"""Networks whose neurons several GPUs share equal the network on one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.processes import SECONDS, finish, torchrun

PROGRAM = Path(__file__).parents[1] / "distributed" / "programs" / "sharded_neurons.py"
RANKS = min(torch.cuda.device_count(), 4)


@pytest.mark.skipif(RANKS < 2, reason="needs two GPUs")
def test_as_one_gpu() -> None:
    output = finish(torchrun(RANKS, PROGRAM), 2 * SECONDS)
    assert output.count("all is well") == RANKS
