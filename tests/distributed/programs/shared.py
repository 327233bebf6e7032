"""Compare networks whose time all processes share with the same networks in one process. On GPUs
also compare networks whose batch they share, with `SyncBatchNorm`.

torchrun --nproc_per_node 2 tests/distributed/programs/shared.py cpu|cuda [hang]
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import spikefuse as sf
from spikefuse.distributed import (
    disconnect,
    faults,
    gather_steps,
    make_mesh,
    mean_over_steps,
    reduce_gradients,
    shard_time,
    steps_of,
)
from spikefuse.testing import make_input

T = 13


class Scale(nn.Module):
    """A learnable layer whose result does not depend on the number of rows, bit for bit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, 96))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def spiking() -> sf.Temporal:
    return sf.Temporal(nn.Sequential(Scale(), sf.PLIF(0.6, 0.3), Scale(), sf.ALIF()))


def normalized() -> sf.Temporal:
    """No spikes, so that differences in rounding stay small."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(16)
    nn.init.uniform_(norm.weight)
    conv = nn.Conv2d(3, 16, 3)
    return sf.Temporal(nn.Sequential(conv, norm, sf.LI(0.5), nn.Flatten(), nn.Linear(576, 10)))


def fused() -> sf.Temporal:
    """A fused block whose outputs are not spikes."""
    return sf.fuse(normalized())


def checkpointed() -> sf.Temporal:
    """The same, recomputed in microbatches."""
    net = fused()
    net.memory = sf.memory.Checkpoint(4)
    return net


def spiking_checkpointed() -> sf.Temporal:
    net = spiking()
    net.memory = sf.memory.Checkpoint(2)
    return net


def step(
    net: nn.Module, x: Tensor, mesh: DeviceMesh | None, rows: slice = slice(None)
) -> list[Tensor]:
    """All outputs, the average gradients and the running statistics."""
    labels, mine = torch.arange(x.shape[1]) % 10, slice(None)
    if mesh is not None:
        time_axis, data = mesh["time"], mesh["data"]
        mine = steps_of(len(x), time_axis.get_local_rank(), time_axis.size())
        rows = steps_of(x.shape[1], data.get_local_rank(), data.size())
    y = net(x[mine, rows])
    mean = y.mean(0) if mesh is None else mean_over_steps(y, mesh["time"])
    F.cross_entropy(mean, labels.to(x.device)[rows]).backward()
    if mesh is not None:
        reduce_gradients(net, mesh)
        y = gather_steps(y.detach(), mesh["time"])
    return [y.detach(), *(p.grad for p in net.parameters()), *net.buffers()]


def check(mesh: DeviceMesh, device: torch.device) -> None:
    data = mesh["data"]
    rows = steps_of(8, data.get_local_rank(), data.size())
    # On a CPU, tests/distributed has all cases, in processes that are started once.
    every = device.type == "cuda"
    for chunks, dtype in ((3, torch.float32), (1, torch.bfloat16))[: 1 + every]:
        x = make_input((T, 8, 96), dtype, device)
        expected = step(spiking().to(device, dtype), x, None)
        for make in (spiking, spiking_checkpointed):
            found = step(shard_time(make().to(device, dtype), mesh["time"], chunks), x, mesh)
            where = f"{make.__name__}, {dtype}, {chunks} chunks"
            assert torch.equal(found[0], expected[0][:, rows]), where
            tolerance = 1e-4 if dtype == torch.float32 else 5e-2
            torch.testing.assert_close(found[1:], expected[1:], rtol=tolerance, atol=tolerance)
    if data.size() > 1:
        return
    for layout in (torch.channels_last, torch.contiguous_format)[: 1 + every]:
        x = make_input((T, 8, 3, 8, 8), device=device)
        x = x.flatten(0, 1).contiguous(memory_format=layout).unflatten(0, (T, 8))
        for make in (normalized, fused, checkpointed):
            expected = step(make().to(device), x, None)
            found = step(shard_time(make().to(device), mesh["time"], 2), x, mesh)
            torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-4)


def check_synchronized(device: torch.device) -> None:
    """Compare `DistributedDataParallel`, which supports these norms on GPUs only."""
    rank, count = dist.get_rank(), dist.get_world_size()
    rows = steps_of(2 * count, rank, count)
    x = make_input((T, 2 * count, 3, 8, 8), device=device)
    for make in (fused, checkpointed):
        expected = step(make().to(device), x, None)
        shared = sf.fuse(nn.SyncBatchNorm.convert_sync_batchnorm(normalized().to(device)))
        shared.memory = make().memory
        found = step(DistributedDataParallel(shared), x, None, rows)
        expected[0] = expected[0][:, rows]
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-4)


def hang(mesh: DeviceMesh, device: torch.device) -> None:
    faults.LIFE = 3.0
    net = shard_time(spiking().to(device), mesh["time"], timeout=4.0)
    x = make_input((4, 8, 96), device=device)
    net(x).sum().backward()
    if dist.get_rank() == 1:
        time.sleep(300)
    print(net(x).sum().item())
    print(net(x).sum().item())


def main() -> None:
    device = torch.device(sys.argv[1])
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    mesh = make_mesh(time=None, data=1, device=device.type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    if sys.argv[2:] == ["hang"]:
        hang(mesh, device)
        return
    check(mesh, device)
    if device.type == "cuda":
        check_synchronized(device)
    count = dist.get_world_size()
    for time_size in (2, 4):
        if count > time_size and count % time_size == 0:
            check(make_mesh(count // time_size, time_size, device.type), device)
    print(f"rank {dist.get_rank()} of {count}: all is well", flush=True)
    disconnect()


if __name__ == "__main__":
    main()
