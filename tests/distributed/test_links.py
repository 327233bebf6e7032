"""Tensors sent between two ranks: in any memory layout, several at a time, or none."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import spikefuse as sf
from spikefuse.distributed import shard_time
from spikefuse.distributed.time_sharding import TimeShard
from tests.distributed.processes import Group


def shard_of(axis: DeviceMesh) -> TimeShard:
    shard = shard_time(sf.Temporal(sf.LIF()), axis).passing
    assert isinstance(shard, TimeShard)
    return shard


def sent(axis: DeviceMesh, tensors: list[Tensor]) -> list[Tensor]:
    """What rank 1 receives, and what rank 0 gets back doubled."""
    shard, found = shard_of(axis), [torch.empty_like(x) for x in tensors]
    if shard.after is not None:
        shard.after.send(tensors)
        shard.watchdog.wait(shard.after.receive(found))
        shard.after.flush()
    if shard.before is not None:
        shard.watchdog.wait(shard.before.receive(found))
        shard.before.send([2 * x for x in found])
        shard.before.flush()
    return found


def test_any_dense_memory_order(group: Group) -> None:
    image = torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    tensors = [torch.rand(4, 3), image, torch.rand(4, 3).t(), torch.empty(0, 3)]
    back, there = group(sent, tensors, size=2)
    assert all(torch.equal(a, b) for a, b in zip(there, tensors, strict=True))
    assert all(torch.equal(a, 2 * b) for a, b in zip(back, tensors, strict=True))


def together(axis: DeviceMesh) -> list[Tensor]:
    shard, x = shard_of(axis), torch.full((2,), axis.get_local_rank() + 1.0)
    rows = shard.collectives.gather(x)
    shard.collectives.sum(x)
    return [*rows, x]


def test_collectives(group: Group) -> None:
    for found in group(together, size=3):
        assert [x.tolist() for x in found] == [[1.0] * 2, [2.0] * 2, [3.0] * 2, [6.0] * 2]
