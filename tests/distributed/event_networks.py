"""Event networks whose neurons ranks share, compared with the same networks in one process."""

from __future__ import annotations

import copy
import itertools

import torch
import torch.distributed as dist
from torch import nn

import spikefuse as sf
from spikefuse.distributed import NeuronShard, shard_neurons
from spikefuse.nn import EventLinear, Events

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
    """Take one step; return the outputs."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.zero_grad()
    y = sf.Temporal(net)(x)
    y.mean(0).square().sum().backward()
    optimizer.step()
    return y.detach()


def spikes() -> Events:
    torch.manual_seed(1)
    return Events.from_dense((torch.rand(12, 3, 30) < 0.2).float())


def compare(
    group: dist.ProcessGroup | None, device: str = "cpu", steps: int = 3, **options
) -> None:
    """Compare events, outputs and weights in training steps.

    Shards may choose other products, which round otherwise, than the whole layers: each step starts
    from equal weights, since a surrogate with a cutoff makes much of small differences.
    """
    x = spikes().to(device)
    whole = network(**options).to(device)
    shards = shard_neurons(network(**options), group).to(device)
    assert len(list(shards.parameters())) == 6
    inner = sf.Temporal(whole[:1])(x), sf.Temporal(shards[:1])(x)
    for name in ("offsets", "fired", "indices"):
        assert torch.equal(getattr(inner[0], name), getattr(inner[1], name))
    for _ in range(steps):
        found, expected = train(shards, x), train(whole, x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        for one, part in zip(whole, shards, strict=True):
            share = slice(None)
            if isinstance(part, NeuronShard):
                assert 0 < part.layer.out_features < one.out_features
                share = part.share
            for of_whole, of_part in zip(one.parameters(), part.parameters(), strict=True):
                torch.testing.assert_close(of_part, of_whole[share], rtol=1e-4, atol=1e-5)
                of_part.data.copy_(of_whole[share])


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
            grad = grad[part.share]
        torch.testing.assert_close(part.layer.weight.grad, grad)
