"""Networks whose neurons several processes share equal the network in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import spikefuse as sf
from spikefuse.distributed import NeuronShard, Replicated, shard_neurons
from spikefuse.events import format as events
from spikefuse.nn import EventLinear, Events
from tests.distributed.event_networks import (
    compare,
    fewer_neurons_than_ranks,
    network,
    spikes,
    train,
)
from tests.distributed.processes import SIZE, Group
from tests.events.waits import waits


def in_subgroup(axis: DeviceMesh) -> None:
    if axis.size() > 1:
        compare(axis.get_group())


def test_subgroups_equal_one_process(group: Group) -> None:
    train(network(), spikes())  # so that kernels are compiled once, not by each process
    for size, world in ((2, SIZE), (3, 3)):
        group(in_subgroup, size=size, world=world)


def limited_capacity(_: DeviceMesh) -> None:
    compare(None, capacity=0.2)


def one_neuron(_: DeviceMesh) -> None:
    fewer_neurons_than_ranks()


def events_at_the_end(_: DeviceMesh) -> None:
    """Every rank computes the loss of the events that leave the network, whose gradient counts
    once; frozen layers stay frozen; a rank that calls its layer alone does not wait for others."""
    x, rank = spikes(), dist.get_rank()
    whole = sf.Temporal(network()[:2]).eval()
    whole.net[1].bias.requires_grad_(False)
    shards = shard_neurons(whole)
    assert not shards.training
    with pytest.raises(ValueError, match="expected 30"):
        shards.net[0](Events.from_dense(torch.zeros(2, 3, 31)))
    shards(x)
    if rank == 0:
        assert shards.net[0].layer(x).shape[2] == shards.net[0].bounds[1]
    for net in (whole, shards):
        net(x).to_dense().square().sum().backward()
    for one, part in zip(whole.net, shards.net, strict=True):
        torch.testing.assert_close(part.layer.weight.grad, one.weight.grad[part.share])
    assert shards.net[1].layer.bias.grad is None


def nothing_to_exchange(_: DeviceMesh) -> None:
    """Silent neurons, and no samples at all."""
    shards = shard_neurons(network())
    for x in (Events.from_dense(torch.zeros(12, 3, 30)), Events.from_dense(torch.zeros(12, 0, 30))):
        with torch.no_grad():
            for shard in shards:
                shard.layer.bias.zero_()
        shards.zero_grad()
        y = sf.Temporal(shards)(x)
        assert y.shape == (*x.shape[:2], 10)
        y.sum().backward()
        assert shards[1].layer.activity.candidates == 0
        assert not shards[0].layer.weight.grad.any()


def without_gradients(_: DeviceMesh) -> None:
    net = network()
    shards = shard_neurons(net)
    with torch.no_grad():
        torch.testing.assert_close(sf.Temporal(shards)(spikes()), sf.Temporal(net)(spikes()))


CHECKS = limited_capacity, one_neuron, events_at_the_end, nothing_to_exchange, without_gradients


@pytest.mark.parametrize("check", CHECKS)
def test_all_ranks_equal_one_process(group: Group, check: Callable[[DeviceMesh], None]) -> None:
    group(check)


def lists_by_triton(axis: DeviceMesh) -> None:
    """The same with Triton's kernels. In a training step, each sharded layer reads the lengths of
    all ranks' lists once."""
    from spikefuse.events import lists_triton

    ranks = axis.get_group()
    if axis.size() == 1:
        return
    with mock.patch.object(events, "_kernels", return_value=lists_triton):
        compare(ranks, steps=2, impl="dense")  # whose products need no interpreter
        shards = sf.Temporal(shard_neurons(network(impl="dense"), ranks))
        x = spikes()
        seen = waits(lambda: shards(x).square().sum().backward())
    assert seen == ["tolist"] * 2


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
def test_lists_by_triton(group: Group) -> None:
    group(lists_by_triton, size=3)


def test_temporal_is_preserved() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = sf.Temporal(network(), sf.memory.Bits())
        shards = shard_neurons(net)
        assert type(shards) is sf.Temporal
        assert shards.memory == sf.memory.Bits()
        assert [type(layer) for layer in shards.net] == [NeuronShard, NeuronShard, Replicated]
        torch.testing.assert_close(shards(spikes()), net(spikes()))
    finally:
        dist.destroy_process_group()


def test_learnable_neurons_raise() -> None:
    neuron = sf.PLIF(surrogate=sf.surrogate.FastSigmoid(10.0, cutoff=-0.3))
    with pytest.raises(ValueError, match="PLIF has values that are tensors"):
        shard_neurons(nn.Sequential(EventLinear(3, 4, neuron)))


def test_other_modules_raise() -> None:
    with pytest.raises(TypeError, match="net contains a Linear: expected EventLinear"):
        shard_neurons(nn.Sequential(nn.Linear(3, 4)))
    with pytest.raises(TypeError, match=r"net is a EventLinear: expected an nn.Seq"):
        shard_neurons(sf.Temporal(EventLinear(3, 4)))
