"""Which parameters an optimizer decays."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import spikefuse as sf


def test_neurons_norms_and_biases_are_exempt() -> None:
    surrogate = sf.surrogate.Sigmoid(nn.Parameter(torch.ones(3, 1)))
    layers = nn.Linear(4, 3), nn.BatchNorm1d(3), sf.PLIF(surrogate=surrogate), nn.LayerNorm((3, 1))
    delayed = sf.DelayedLinear(3, 3, max_delay=4)
    recurrent = sf.Recurrent(sf.LIF(), 3, bias=True)
    net = sf.Temporal(nn.Sequential(*layers, recurrent, delayed, sf.PSN(4)))
    decayed, exempt = sf.nn.parameter_groups(net, 0.1)
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.1, 0.0)
    weights = layers[0].weight, recurrent.weight, delayed.weight
    assert [id(p) for p in decayed["params"]] == [*map(id, weights)]
    found = {id(p) for group in (decayed, exempt) for p in group["params"]}
    assert found == set(map(id, net.parameters()))
    torch.optim.SGD([decayed, exempt], lr=0.1)


def test_a_negative_weight_decay() -> None:
    with pytest.raises(ValueError, match=r"weight_decay is -0\.1: expected a number of at least 0"):
        sf.nn.parameter_groups(nn.Linear(2, 2), -0.1)
