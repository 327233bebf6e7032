"""What `step` detaches comes back detached, as from the eager loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import spikefuse as sf


class Detached(sf.Neuron):
    """States that later steps follow, after a delay, or not at all; a threshold may be learned."""

    v, w, u, z = sf.State(), sf.State(), sf.State(), sf.State()

    def __init__(self, learned=False):
        super().__init__()
        self.threshold = nn.Parameter(torch.tensor(0.5), requires_grad=learned)
        self.surrogate = sf.surrogate.Arctan()

    def step(self, x, v, w, u, z):
        h = 0.5 * v.detach() + x
        s = self.surrogate(h - self.threshold)
        outputs = s, (h > 0.25).float(), u, self.surrogate(v - 0.1)
        return outputs, ((h - s).detach(), 0.5 * w + s.detach(), z, h)


def flags(layer, inputs, impl, **options):
    outputs, states = layer(*inputs, impl=impl, return_state=True, **options)
    return [x.requires_grad for x in (*outputs, *states)]


LAYERS = {
    "plain": lambda neuron: neuron,
    "recurrent": lambda neuron: sf.Recurrent(neuron, 3).requires_grad_(False),
    "learned recurrent": lambda neuron: sf.Recurrent(neuron, 3),
    "block": lambda neuron: sf.nn.Block(nn.BatchNorm1d(3), neuron),
    "frozen block": lambda neuron: sf.nn.Block(nn.BatchNorm1d(3), neuron).requires_grad_(False),
    "evaluated": lambda neuron: sf.nn.Block(nn.BatchNorm1d(3), neuron).eval(),
}


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("layer", LAYERS)
def test_results_require_gradients_where_those_of_the_loop_do(layer, steps, backends):
    for learned, leaf in ((False, True), (True, False)):
        layer_ = LAYERS[layer](Detached(learned)).to(backends.device)
        x = torch.randn(steps, 2, 3, device=backends.device, requires_grad=leaf)
        for impl in backends.impls:
            found = flags(layer_, (x,), impl)
            assert found == flags(layer_, (x,), "reference"), (impl, learned)


@pytest.mark.parametrize("which", range(4))
def test_an_initial_state_that_requires_gradients(which):
    neuron = Detached()
    for steps in (1, 2, 3, 5):
        state = tuple(torch.rand(2, 3, requires_grad=i == which) for i in range(4))
        x = (torch.rand(steps, 2, 3),)
        found = flags(neuron, x, "numba", state=state)
        assert found == flags(neuron, x, "reference", state=state), steps


@pytest.mark.parametrize("compiled", [False, True])
def test_an_online_loop_differentiates_each_step(compiled):
    """Its graph ends where the step detaches the state."""

    class Online(sf.Neuron):
        v = sf.State()

        def __init__(self):
            super().__init__()
            self.surrogate = sf.surrogate.Arctan()

        def step(self, x, v):
            h = 0.5 * v.detach() + x
            s = self.surrogate(h - 0.5)
            return s, ((h - s).detach(),)

    linear, neuron = nn.Linear(3, 4), Online()

    def call(x, state, impl):
        return neuron(linear(x), state=state, return_state=True, impl=impl)

    run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    gradients = {}
    for impl, function in (("reference", call), ("numba", run)):
        linear.zero_grad()
        state = (torch.zeros(2, 4),)
        for step in range(3):
            s, state = function(torch.full((1, 2, 3), 0.3 * step), state, impl)
            assert not state[0].requires_grad
            s.sum().backward()
        gradients[impl] = linear.weight.grad.clone()
    torch.testing.assert_close(gradients["numba"], gradients["reference"])


def test_a_dynamic_number_of_steps():
    neuron = Detached()

    def call(x):
        return neuron(x, return_state=True)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for steps in (2, 1, 3, 8):
        x = torch.rand(steps, 2, 3, requires_grad=True)
        found, expected = compiled(x), call(x)
        for a, e in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
            assert a.requires_grad == e.requires_grad
            assert torch.equal(a, e)
