"""Definitions made of other definitions: one for each, and freed with it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import spikefuse as sf
from spikefuse import reference
from spikefuse.block.definition import NORM_VALUES, Kind, with_batch_norm
from spikefuse.neurons.online import online_neuron
from spikefuse.neurons.per_step import with_inputs


@pytest.mark.parametrize("made", ["with_inputs", "online", "block"])
def test_classes_are_freed(made):
    class Own(sf.LIF):
        """A neuron that its user drops."""

    neuron, x = Own(0.5), torch.ones(2, 1, 3)
    if made == "with_inputs":
        reference.scan(with_inputs(neuron, neuron.values(), ("decay",)), (x, x))
    elif made == "online":
        reference.scan(online_neuron(neuron, "d-rtrl"), (x, x))
    else:
        reference.scan(with_batch_norm(neuron, [torch.ones(3)] * len(NORM_VALUES), Kind()), (x,))
    kind = weakref.ref(Own)
    del Own, neuron
    gc.collect()  # what was made of the class
    gc.collect()  # the class
    assert kind() is None


def test_calls_share_a_definition_and_read_values_anew():
    neuron = sf.LIF(nn.Parameter(torch.tensor(0.5)), threshold=nn.Parameter(torch.tensor(3.0)))
    x = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64).view(3, 1, 1)

    def potentials(threshold):
        neuron.threshold = nn.Parameter(torch.tensor(threshold))
        definition = with_inputs(neuron, neuron.values(), ("decay",))
        _, (v,) = reference.scan(definition, (x, torch.full_like(x, 0.25)))
        return definition, v.item()

    first, v = potentials(3.0)
    assert v == (1.0 * 0.25 + 2.0) * 0.25
    again, v = potentials(2.0)  # 2.25 is reset
    assert v == 0.0
    assert again is first
    neuron.reset = "soft"
    changed, v = potentials(2.0)
    assert v == (1.0 * 0.25 + 2.0 - 2.0) * 0.25
    assert changed is not first


@pytest.mark.parametrize("shape", [(1, 1, 3, 1, 1), (1, 1, 1, 1, 1), (4, 1, 3, 1, 1)])
def test_values_that_broadcast_over_a_sequence(shape):
    torch.manual_seed(0)
    x, decay = torch.rand(4, 2, 3, 5, 5), torch.rand(shape)
    v, expected = torch.zeros(2, 3, 5, 5), []
    for t in range(4):
        h = decay.expand(4, 1, *shape[2:])[t] * v + x[t]
        s = (h >= 0.5).float()
        v = h * (1 - s)
        expected.append(s)
    gradients = []
    for impl in ("auto", "reference"):
        neuron = sf.LIF(nn.Parameter(decay), threshold=0.5)
        y = neuron(x, impl=impl)
        assert torch.equal(y, torch.stack(expected))
        gradients.append(torch.autograd.grad(y.square().sum(), neuron.decay)[0])
    torch.testing.assert_close(*gradients)
