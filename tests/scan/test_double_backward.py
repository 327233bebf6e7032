"""Gradients of gradients are refused."""

from __future__ import annotations

import pytest
import torch

import spikefuse as sf
from spikefuse.scan import op
from spikefuse.scan.records import Arguments, Wanted
from spikefuse.scan.state_passing import StatePassing
from spikefuse.testing import make_input

X = make_input((20, 2, 6))
REFUSED = 'double backward through a spikefuse neuron is not supported.*impl="reference"'


@pytest.mark.parametrize("make", [sf.LIF, sf.PLIF])
def test_double_backward(make):
    x, neuron = X.clone().requires_grad_(), make()
    (gradient,) = torch.autograd.grad(neuron(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=REFUSED):
        gradient.sum().backward()
    y = neuron(x, impl="reference")
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    gradient.sum().backward()
    assert x.grad.isfinite().all()


def test_double_backward_with_state_passing():
    x = X.clone().requires_grad_()
    name, scalars, _ = op.choose(sf.LIF(), x, Wanted(impl="numba"))
    arguments = Arguments([x], scalars=scalars, passing=StatePassing())
    (y,) = op.run(name, arguments, Wanted()).outputs
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=REFUSED):
        gradient.sum().backward()
