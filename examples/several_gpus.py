"""Train on several GPUs, or processes of a CPU, each on its share of every batch.

torchrun --nproc_per_node 4 examples/several_gpus.py --epochs 10
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import spikefuse as sf
from spikefuse.distributed import connect, disconnect, steps_of
from spikefuse.nn.encode import direct

NUM_STEPS, BATCH = 8, 64


def make_network() -> nn.Module:
    """`[T, B, 1, 8, 8]` to `[T, B, 10]`."""
    return sf.Temporal(nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), sf.LIF(),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16 * 4 * 4, 10)))  # fmt: skip


def main(epochs: int) -> float:
    """Train, and return the accuracy on the test images, the same on all ranks."""
    on_gpu = torch.cuda.is_available()
    connect("nccl" if on_gpu else "gloo")  # with the variables that torchrun sets
    rank, count = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")

    # Every rank reads the same examples and draws the same order; each takes its share of a batch.
    train, test = sf.data.load("digits")
    order = torch.Generator().manual_seed(0)
    mine = steps_of(BATCH, rank, count)

    torch.manual_seed(0)
    net = sf.fuse(make_network()).to(device)
    # Averages gradients over ranks during backward, and begins with the weights of rank 0. Batch
    # norms take the statistics of a rank's share; nn.SyncBatchNorm takes those of the batch.
    parallel = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(parallel.parameters(), lr=2e-3)

    for epoch in range(epochs):
        parallel.train()
        for rows in torch.randperm(len(train), generator=order).split(BATCH):
            if len(rows) < BATCH:
                continue
            batch = train[rows[mine]].to(device)
            outputs = parallel(direct(sf.data.expand(batch), NUM_STEPS))
            loss = F.cross_entropy(outputs.mean(0), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / count:.3f}", flush=True)

    # Each rank tests its share of the images.
    net.eval()
    batch = test[steps_of(len(test), rank, count)].to(device)
    with torch.no_grad():
        found = net(direct(sf.data.expand(batch), NUM_STEPS)).mean(0).argmax(1)
    correct = (found == batch.labels).sum()
    dist.all_reduce(correct)
    accuracy = float(correct) / len(test)
    if rank == 0:
        print(f"accuracy {accuracy:.3f} with {count} processes")
    disconnect()
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    main(**vars(parser.parse_args()))
