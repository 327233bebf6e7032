"""Compare replayed CUDA graphs of steps whose time all GPUs share with eager steps.

torchrun --nproc_per_node 2 tests/distributed/programs/recorded.py
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from shared import T, checkpointed, fused, normalized, spiking, spiking_checkpointed
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import spikefuse as sf
from spikefuse.distributed import (
    make_mesh,
    mean_over_steps,
    reduce_gradients,
    shard_time,
    steps_of,
)
from spikefuse.testing import make_input

CASES = [
    (spiking, (96,), "exact", 1),
    (spiking, (96,), "exact", 3),
    (normalized, (3, 8, 8), "exact", 2),
    (fused, (3, 8, 8), "exact", 2),
    (fused, (3, 8, 8), "shard", 4),
    (spiking_checkpointed, (96,), "exact", 1),
    (checkpointed, (3, 8, 8), "exact", 1),
    (checkpointed, (3, 8, 8), "shard", 1),
]


def training(net: sf.Temporal, x: Tensor, labels: Tensor, mesh: DeviceMesh) -> list[Tensor]:
    """The outputs of this rank's steps, their mean over all steps, and the gradients."""
    for p in net.parameters():
        p.grad = None
    y = net(x)
    mean = mean_over_steps(y, mesh["time"])
    F.cross_entropy(mean, labels).backward()
    reduce_gradients(net, mesh)
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    return [y.detach(), mean.detach(), *grads]


@torch.no_grad()
def evaluation(net: sf.Temporal, x: Tensor, labels: Tensor, mesh: DeviceMesh) -> list[Tensor]:
    y = net(x)
    return [y, mean_over_steps(y, mesh["time"])]


def recorded(step: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(5):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        found = step()
    return graph, found


def compare(step: Callable[[], list[Tensor]], x: Tensor) -> None:
    """Compare replays with eager steps, before and after the input changes."""
    graph, found = recorded(step)
    for _ in range(3):
        expected = [y.clone() for y in step()]
        for y in found:
            y.fill_(torch.nan)
        graph.replay()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        x.copy_(x.flip(1))
    for _ in range(20):  # ranks may run ahead of each other
        graph.replay()
    torch.cuda.synchronize()
    graph.reset()


def check(mesh: DeviceMesh, device: torch.device) -> None:
    axis = mesh["time"]
    mine = steps_of(T, axis.get_local_rank(), axis.size())
    labels = torch.arange(8, device=device) % 10
    for make, shape, statistics, chunks in CASES:
        net = shard_time(make().to(device), axis, chunks, statistics)
        x = make_input((T, 8, *shape), device=device)[mine].clone()
        for kind in (training, evaluation):
            compare(lambda: kind(net.train(kind is training), x, labels, mesh), x)  # noqa: B023
            gc.collect()  # a graph must not outlive its connections
        if dist.get_rank() == 0:
            print(f"{make.__name__}, {statistics}, {chunks} chunks: as eagerly", flush=True)


def main() -> None:
    # NCCL's watchdog would query events while a graph is recorded.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    mesh = make_mesh(data=1, device="cuda")
    check(mesh, torch.device("cuda", torch.cuda.current_device()))
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: all is well", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
