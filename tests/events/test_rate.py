"""Weights scaled to a firing rate."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import spikefuse as sf
from spikefuse.nn import EventLinear, scale_to_rate


def net() -> nn.Sequential:
    torch.manual_seed(0)
    surrogate = sf.surrogate.FastSigmoid(cutoff=-0.1)
    neurons = [sf.LIF(0.9, detach_reset=True, surrogate=surrogate) for _ in range(2)]
    layers = [EventLinear(a, 150, n) for a, n in zip((60, 150), neurons, strict=True)]
    return nn.Sequential(*layers, EventLinear(150, 5))


@pytest.mark.parametrize("rate", [0.01, 0.1])
def test_rates(rate: float) -> None:
    network, x = net(), (torch.rand(30, 8, 60) < 0.1).float()
    last = network[2].weight.clone()
    found = scale_to_rate(network, x, rate)
    assert found.keys() == {"0", "1"}
    assert all(0.8 * rate < value < 1.2 * rate for value in found.values())
    sf.Temporal(network)(x)
    assert [network[i].activity.rate for i in (1, 2)] == list(found.values())
    assert torch.equal(network[2].weight, last)


def test_no_such_scale() -> None:
    network = net()
    before = network[0].weight.clone()
    with pytest.raises(ValueError, match="neurons of 0 fire at 0"):
        scale_to_rate(network, torch.zeros(30, 8, 60), 0.01)
    assert torch.equal(network[0].weight, before)
    with pytest.raises(ValueError, match=r"rate is 1\.5: expected"):
        scale_to_rate(network, torch.zeros(30, 8, 60), 1.5)
