"""A recorded step of DistributedDataParallel equals an eager one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import spikefuse as sf

RANKS = 2
STEPS = 16


def train(rank: int, recorded: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(20, 64), torch.nn.BatchNorm1d(64), sf.LIF(), torch.nn.Linear(64, 10)]
    net = sf.fuse(sf.Temporal(torch.nn.Sequential(*layers))).cuda()
    with torch.cuda.stream(torch.cuda.Stream()):
        parallel = DistributedDataParallel(net, [rank])
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, fused=True)

    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(parallel(x).mean(0), y)
        loss.backward()
        optimizer.step()
        return loss

    run = sf.graph_step(step) if recorded else step
    generator = torch.Generator("cuda").manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        x = 2 * torch.rand(5, 8, 20, device="cuda", generator=generator)
        y = torch.randint(0, 10, (8,), device="cuda", generator=generator)
        losses.append(run(x, y).item())
    if recorded:
        assert (run.num_eager, run.num_graphs, run.num_replays) == (11, 1, STEPS - 11)
        run.reset()  # a graph must not outlive its connections
    return losses, net.state_dict()


def run(rank: int, file: str) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", f"file://{file}", rank=rank, world_size=RANKS, device_id=device)
    try:
        (losses, state), (recorded, recorded_state) = (train(rank, r) for r in (False, True))
        assert losses == recorded
        for name, value in state.items():
            assert torch.equal(value, recorded_state[name]), name
            others = value.clone()
            dist.broadcast(others, 0)
            if "running" not in name:
                assert torch.equal(value, others), name
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")
def test_as_eager(tmp_path: Path) -> None:
    mp.spawn(run, (str(tmp_path / "store"),), nprocs=RANKS)
