"""The event perceptron: its options, spikes and gradients."""

from __future__ import annotations

import torch

import spikefuse as sf
from spikefuse.models import event_mlp
from spikefuse.nn import Events, scale_to_rate


def neuron() -> sf.LIF:
    return sf.LIF(0.95, detach_reset=True, surrogate=sf.surrogate.FastSigmoid(cutoff=-0.3))


def test_spikes_and_gradients() -> None:
    torch.manual_seed(0)
    net = event_mlp(neuron, 2, 5, (4, 6), hidden=(60, 50))
    x = Events.from_dense((torch.rand(20, 4, 2, 4, 6) < 0.2).float())
    scale_to_rate(net, x, 0.05)
    logits = sf.Temporal(net)(x)
    assert logits.shape == (20, 4, 5)
    logits.square().sum().backward()
    assert all(parameter.grad.any() for parameter in net.parameters())


def test_options_reach_the_layers() -> None:
    net = event_mlp(neuron, 1, 5, (4, 6), (30, 40), 0.1, "raise")
    assert [layer.capacity for layer in net] == [None, 0.1, 0.1]
    assert {layer.overflow for layer in net} == {"raise"}
    assert [layer.out_features for layer in net] == [30, 40, 5]
