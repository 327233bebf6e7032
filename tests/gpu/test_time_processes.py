"""Time sharding over NCCL, in processes with one GPU each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.processes import SECONDS, ended, finish, torchrun

PROGRAMS = Path(__file__).parents[1] / "distributed" / "programs"


def needs(count: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} GPUs")


@pytest.mark.parametrize("count", [pytest.param(n, marks=needs(n)) for n in (2, 3, 4)])
def test_shared_time_equals_one_gpu(count: int) -> None:
    output = finish(torchrun(count, PROGRAMS / "shared.py", "cuda"), 2 * SECONDS)
    assert output.count("all is well") == count


@pytest.mark.parametrize("count", [pytest.param(n, marks=needs(n)) for n in (2, 4)])
def test_replays_of_a_graph_equal_eager_steps(count: int) -> None:
    output = finish(torchrun(count, PROGRAMS / "recorded.py"), 2 * SECONDS)
    assert output.count("all is well") == count


@needs(2)
def test_a_rank_that_hangs_ends_the_others() -> None:
    process = torchrun(2, PROGRAMS / "shared.py", "cuda", "hang")
    output = ended(process)
    assert process.returncode != 0
    assert "rank 1 keeps the others waiting" in output
