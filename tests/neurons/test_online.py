"""The derivatives of rules, of two steps by hand."""

from __future__ import annotations

import pytest
import torch

import spikefuse as sf
from spikefuse import reference
from spikefuse.neurons.online import online_neuron

# By rule: the gradients of both inputs through the states, and of the same step, of the second
# spike. The first potential is 1.5, so the neuron spikes and 1.0 is subtracted; the second one is
# 0.5 * 0.5 + 1.0 = 1.25. The surrogate's derivative is 0.5 and 0.75 there.
SLOPES = 0.5, 0.75
EXPECTED = {
    "sltt": [0.0, 0.75],
    "ottt": [0.75 * 0.5, 0.75],
    "e-prop": [0.75 * 0.5, 0.75],
    "d-rtrl": [0.75 * 0.5 * (1 - 1.0 * 0.5), 0.75],
}


@pytest.mark.parametrize("rule", EXPECTED)
def test_soft_reset(rule):
    neuron = sf.LIF(0.5, reset="soft", surrogate=sf.surrogate.Triangle(1.0))
    x = torch.tensor([1.5, 1.0], dtype=torch.float64).view(2, 1, 1).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    inputs = (x,) if rule == "sltt" else (x, twin)
    (spikes,), (v,) = reference.scan(online_neuron(neuron, rule), inputs)
    assert spikes.flatten().tolist() == [1.0, 1.0]
    assert v.item() == 0.25
    spikes[1].sum().backward()
    assert x.grad.flatten().tolist() == EXPECTED[rule]
    if rule != "sltt":
        assert twin.grad.flatten().tolist() == [0.0, 0.75]
        assert online_neuron(neuron, rule) is online_neuron(neuron, rule)


def test_hard_reset():
    neuron = sf.LIF(0.5, surrogate=sf.surrogate.Triangle(1.0))
    # Potentials 0.5, without a spike, and 1.25; slopes 0.5 and 0.75.
    for rule, chain in (("ottt", 0.5), ("e-prop", 0.5), ("d-rtrl", 0.5 * (1 - 0.5 * 0.5))):
        x = torch.tensor([0.5, 1.0], dtype=torch.float64).view(2, 1, 1).requires_grad_()
        (spikes,), _ = reference.scan(online_neuron(neuron, rule), (x, x.detach()))
        spikes[1].sum().backward()
        assert x.grad.flatten().tolist() == [0.75 * chain, 0.75]
