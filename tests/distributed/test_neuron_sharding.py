"""Networks whose neurons several processes share equal the network in one process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

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
from tests.events.test_waits import waits


def events_at_the_end() -> None:
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
        share = slice(part.bounds[rank], part.bounds[rank + 1])
        torch.testing.assert_close(part.layer.weight.grad, one.weight.grad[share])
    assert shards.net[1].layer.bias.grad is None


def nothing_to_exchange() -> None:
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


def lists_by_triton() -> None:
    """The same with Triton's kernels. In a training step, each sharded layer reads the lengths of
    all ranks' lists once."""
    from spikefuse.events import lists_triton as event_lists_triton

    events._kernels = lambda x: event_lists_triton
    compare(None, impl="dense")  # whose products need no interpreter
    shards, x = sf.Temporal(shard_neurons(network(impl="dense"))), spikes()
    seen = waits(lambda: shards(x).square().sum().backward())
    assert seen == ["tolist"] * 2


def run(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{file}", rank=rank, world_size=3)
    try:
        two = dist.new_group([0, 1])
        if rank < 2:
            compare(two)
        compare(None, capacity=0.2)
        events_at_the_end()
        nothing_to_exchange()
        fewer_neurons_than_ranks()
        if os.environ.get("TRITON_INTERPRET") == "1":
            lists_by_triton()  # from here on
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(sys.platform != "linux", reason="shares a file")
def test_as_one_process(tmp_path: Path) -> None:
    train(network(), spikes())  # so that kernels are compiled once, not by each process
    mp.spawn(run, (str(tmp_path / "store"),), nprocs=3)


def test_a_temporal() -> None:
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


def test_learned_neurons() -> None:
    neuron = sf.PLIF(surrogate=sf.surrogate.FastSigmoid(10.0, cutoff=-0.3))
    with pytest.raises(ValueError, match="PLIF has 1 values that are tensors"):
        shard_neurons(nn.Sequential(EventLinear(3, 4, neuron)))


def test_other_modules() -> None:
    with pytest.raises(TypeError, match="Linear in a network of EventLinear only"):
        shard_neurons(nn.Sequential(nn.Linear(3, 4)))
    with pytest.raises(TypeError, match=r"EventLinear is not an nn.Sequential of EventLinear"):
        shard_neurons(sf.Temporal(EventLinear(3, 4)))
