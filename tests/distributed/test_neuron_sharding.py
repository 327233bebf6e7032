"""Neurons shared out over processes: the network of one process, whatever the number of ranks."""

from __future__ import annotations

import copy
import itertools
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
from tests.events.test_waits import waits

WIDTHS = (30, 71, 50, 10)


def network(**options) -> nn.Sequential:
    torch.manual_seed(0)
    layers = []
    for i, (a, b) in enumerate(itertools.pairwise(WIDTHS)):
        surrogate = sf.surrogate.FastSigmoid(10.0, cutoff=-0.3)
        neuron = sf.LIF(0.9, detach_reset=True, surrogate=surrogate) if i < 2 else None
        layers.append(EventLinear(a, b, neuron, **options))
        nn.init.normal_(layers[-1].weight, std=2.0 / a**0.5)
    return nn.Sequential(*layers)


def train(net: nn.Module, x: Events) -> torch.Tensor:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        y = sf.Temporal(net)(x)
        y.mean(0).square().sum().backward()
        optimizer.step()
    return y.detach()


def spikes() -> Events:
    torch.manual_seed(1)
    return Events.from_dense((torch.rand(12, 3, 30) < 0.2).float())


def compare(group: dist.ProcessGroup | None, device: str = "cpu", **options) -> None:
    x, rank = spikes().to(device), dist.get_rank(group)
    whole = network(**options).to(device)
    shards = shard_neurons(network(**options), group).to(device)
    assert len(list(shards.parameters())) == 6
    inner = sf.Temporal(whole[:1])(x), sf.Temporal(shards[:1])(x)
    for name in ("offsets", "fired", "indices"):
        assert torch.equal(getattr(inner[0], name), getattr(inner[1], name))
    torch.testing.assert_close(train(shards, x), train(whole, x), rtol=1e-4, atol=1e-4)
    for one, part in zip(whole, shards, strict=True):
        weight = one.weight
        if isinstance(part, NeuronShard):
            share = slice(part.bounds[rank], part.bounds[rank + 1])
            assert 0 < part.layer.out_features < one.out_features
            weight = weight[:, share]
        torch.testing.assert_close(part.layer.weight, weight, rtol=1e-4, atol=1e-5)


def events_at_the_end() -> None:
    """Every rank has the loss of the events that leave the network, and its gradient counts once;
    a layer that was frozen stays so, and nobody waits for a rank that calls its layer alone."""
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
        torch.testing.assert_close(part.layer.weight.grad, one.weight.grad[:, share])
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


def fewer_neurons_than_ranks(device: str = "cpu") -> None:
    torch.manual_seed(0)
    surrogate = sf.surrogate.FastSigmoid(10.0, cutoff=-2.0)
    neuron = sf.LIF(0.9, detach_reset=True, surrogate=surrogate)
    whole = nn.Sequential(EventLinear(30, 1, neuron), EventLinear(1, 10))
    nn.init.constant_(whole[0].weight, 0.5)
    shards = shard_neurons(copy.deepcopy(whole))
    for net in (whole, shards):
        sf.Temporal(net.to(device))(spikes().to(device)).square().sum().backward()
    assert whole[0].weight.grad.any()
    for one, part in zip(whole, shards, strict=True):
        grad = one.weight.grad
        if isinstance(part, NeuronShard):
            grad = grad[:, part.bounds[dist.get_rank()] : part.bounds[dist.get_rank() + 1]]
        torch.testing.assert_close(part.layer.weight.grad, grad)


def lists_by_triton() -> None:
    """The same; of a training step, each layer that is shared out reads once how long lists are,
    those of all ranks."""
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
