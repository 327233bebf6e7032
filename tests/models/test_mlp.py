"""Perceptrons on tensors and events, and their options."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import spikefuse as sf
from spikefuse.models import MODELS, event_mlp, mlp, split_widths
from spikefuse.nn import Events, scale_to_rate


def test_widths_of_the_split() -> None:
    assert [split_widths(n, 1)[0] for n in (2, 3, 4, 5)] == [735, 490, 367, 294]
    for num_layers in (2, 3, 4, 5):
        widths = split_widths(num_layers)
        assert len(widths) == num_layers
        assert 2_938 <= sum(widths) <= 2_944


@pytest.mark.parametrize(("num_layers", "scale"), [(1, 2), (6, 2), (2, 0)])
def test_a_wrong_split(num_layers: int, scale: int) -> None:
    with pytest.raises(ValueError, match="expected 2 to 5 layers and a scale of at least 1"):
        split_widths(num_layers, scale)


def test_the_split_has_no_norm() -> None:
    kinds = [type(m) for m in MODELS["mlp3"](sf.LIF, 1, 20, (1, 700))]
    assert kinds == [nn.Flatten, *[nn.Linear, sf.LIF] * 3, nn.Linear]


def test_hidden_layers_can_be_chosen() -> None:
    net = mlp(sf.IF, 1, 3, (2, 2), hidden=(5, 7, 6))
    assert [m.out_features for m in net if isinstance(m, nn.Linear)] == [5, 7, 6, 3]


def neuron() -> sf.LIF:
    return sf.LIF(0.95, detach_reset=True, surrogate=sf.surrogate.FastSigmoid(cutoff=-0.3))


def test_event_mlp_spikes_and_gradients() -> None:
    torch.manual_seed(0)
    net = event_mlp(neuron, 2, 5, (4, 6), hidden=(60, 50))
    x = Events.from_dense((torch.rand(20, 4, 2, 4, 6) < 0.2).float())
    scale_to_rate(net, x, 0.05)
    logits = sf.Temporal(net)(x)
    assert logits.shape == (20, 4, 5)
    logits.square().sum().backward()
    assert all(parameter.grad.any() for parameter in net.parameters())


def test_event_mlp_passes_its_options_to_the_layers() -> None:
    net = event_mlp(neuron, 1, 5, (4, 6), (30, 40), 0.1, "raise")
    assert [layer.capacity for layer in net] == [None, 0.1, 0.1]
    assert {layer.overflow for layer in net} == {"raise"}
    assert [layer.out_features for layer in net] == [30, 40, 5]
