"""Time shared by processes with a GPU each, over NCCL."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.test_nodes import PROGRAM, SECONDS, torchrun


def needs(count: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} GPUs")


@pytest.mark.parametrize("count", [pytest.param(n, marks=needs(n)) for n in (2, 3, 4)])
def test_shared_time_equals_one_gpu(count: int) -> None:
    process = torchrun("--standalone", "--nproc_per_node", str(count), str(PROGRAM), "cuda")
    output, _ = process.communicate(timeout=2 * SECONDS)
    assert process.returncode == 0, output
    assert output.count("all is well") == count


@pytest.mark.parametrize("count", [pytest.param(n, marks=needs(n)) for n in (2, 4)])
def test_replays_of_a_graph_do_what_eager_steps_do(count: int) -> None:
    program = str(PROGRAM.with_name("recorded.py"))
    process = torchrun("--standalone", "--nproc_per_node", str(count), program)
    output, _ = process.communicate(timeout=2 * SECONDS)
    assert process.returncode == 0, output
    assert output.count("all is well") == count


@needs(2)
def test_a_rank_that_hangs_ends_the_others() -> None:
    process = torchrun("--standalone", "--nproc_per_node", "2", str(PROGRAM), "cuda", "hang")
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode != 0
    assert "rank 1 keeps the others waiting" in output
