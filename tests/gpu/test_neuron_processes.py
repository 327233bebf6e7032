"""Networks whose neurons several GPUs share equal the network on one GPU."""

from __future__ import annotations

import faulthandler
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.distributed.event_networks import compare, fewer_neurons_than_ranks
from tests.processes import SECONDS

RANKS = min(torch.cuda.device_count(), 4)


def run(rank: int, file: str) -> None:
    faulthandler.dump_traceback_later(2 * SECONDS, exit=True)  # a rank may wait for ever
    torch.cuda.set_device(rank)
    device = f"cuda:{rank}"
    dist.init_process_group(
        "nccl", f"file://{file}", rank=rank, world_size=RANKS, device_id=torch.device(device)
    )
    try:
        compare(None, device, impl="triton")
        compare(None, device, capacity=0.2)
        fewer_neurons_than_ranks(device)
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(RANKS < 2, reason="needs two GPUs")
def test_as_one_gpu(tmp_path: Path) -> None:
    mp.spawn(run, (str(tmp_path / "store"),), nprocs=RANKS)
