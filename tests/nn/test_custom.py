"""Neurons that users write: nonlinear terms, several inputs and outputs, no randomness."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import spikefuse as sf
from spikefuse.testing import assert_matches_reference, make_input

# A number of neurons that is not a multiple of 16, more steps than one chunk.
SHAPE = (19, 2, 3, 17)

# Terms of the inputs and a state, by what they are made of. Rounded alike everywhere.
EXACT = {
    "where": lambda x, y, u: torch.where(y > u, x, 0.5 * u),
    "clamp": lambda x, y, u: torch.clamp(x, -0.5, 0.5) + u.clamp(min=-1.0) + y.clip(max=0.25),
    "clamp between tensors": lambda x, y, u: torch.clamp(u, torch.minimum(x, y), x),
    "min, max": lambda x, y, u: torch.minimum(x, u) - torch.maximum(y, u) + torch.max(x, y),
    "comparisons": lambda x, y, u: (x >= y) + 0.5 * (u < x) - 0.25 * (u != y) + (x <= 0) * u,
    "logic": lambda x, y, u: torch.where((x > y) & ~(u > x) | (y == 0.5), u, -u),
    "relu, abs, sign": lambda x, y, u: torch.relu(x) - u.abs() * torch.sign(y),
    "whole powers": lambda x, y, u: 0.25 * x**2 - u.pow(3).clamp(-1, 1) + (2 + y.abs()) ** -1,
    "division": lambda x, y, u: x / (1 + u.abs()) + 1 / (2 + y * y),
}
# Rounded to a few units in the last place.
SMOOTH = {
    "exp": lambda x, y, u: torch.exp(-u.abs()) * x + torch.exp(0.25 * y),
    "sigmoid": lambda x, y, u: torch.sigmoid(4 * y) * u + x.sigmoid(),
    "tanh": lambda x, y, u: torch.tanh(x + 0.01 * u) - y.tanh(),
    "sqrt": lambda x, y, u: torch.sqrt(1 + x * x) + (0.5 + u.abs()) ** 0.5 + torch.rsqrt(1 + y * y),
    "log": lambda x, y, u: torch.log(0.5 + u.abs()) + x - 0.5 * y,
    "powers": lambda x, y, u: (0.5 + u.abs()) ** 1.7 - (1 + x * x).pow(-0.3) + 2 ** (0.5 * y),
}


class Terms(sf.Neuron):
    """Two inputs, two states, two outputs, and terms; with a threshold or without one."""

    u, w = sf.State(0.25), sf.State()

    def __init__(self, terms, spiking):
        super().__init__()
        self.terms, self.spiking = tuple(terms), spiking
        self.decay = nn.Parameter(torch.tensor([0.5, 0.6, 0.7]))
        self.surrogate = sf.surrogate.Arctan()

    def step(self, x, y, u, w):
        h = self.decay * w
        for term in self.terms:
            h = h + term(x, y, u)
        s = self.surrogate(h - 0.5) if self.spiking else 0.25 * h
        return (s, h), (0.5 * u + torch.clamp(h, -2.0, 2.0) * (1 - s), 0.75 * w - 0.25 * s)


class GatedReset(sf.Neuron):
    """Adaptive threshold; a gate between hard and soft reset."""

    v, a = sf.State(), sf.State()

    def __init__(self):
        super().__init__()
        self.decay, self.rho = 0.9, 0.95
        self.beta = nn.Parameter(torch.tensor(0.2))
        self.surrogate = sf.surrogate.Sigmoid()

    def step(self, x, y, v, a):
        h = self.decay * v + x
        threshold = 1 + self.beta * a
        s = self.surrogate(h - threshold)
        hard = torch.sigmoid(y)
        v = hard * h * (1 - s) + (1 - hard) * (h - threshold * s)
        return (s, v), (v, self.rho * a + s)


def compare(neuron, backends, exact, dtype=torch.float32):
    inputs = [make_input(SHAPE, dtype, backends.device, seed) for seed in (1, 2)]
    assert_matches_reference(neuron.to(backends.device), inputs, backends.impls, exact=exact)


@pytest.mark.parametrize("first", range(0, len(EXACT), 3))
def test_exact_terms(first, backends):
    """Three at a time: each further kernel takes seconds to compile."""
    terms = [*EXACT.values()][first : first + 3]
    compare(Terms(terms, spiking=True), backends, exact=True)


@pytest.mark.parametrize("first", range(0, len(SMOOTH), 3))
def test_smooth_terms(first, backends):
    terms = [*SMOOTH.values()][first : first + 3]
    compare(Terms(terms, spiking=False), backends, exact=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_inputs_two_states_two_outputs(dtype, backends):
    compare(GatedReset(), backends, exact=False, dtype=dtype)


class Dropped(sf.Neuron):
    v = sf.State()

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def step(self, x, v):
        return self.drop(x), (v,)


def drawing(draw):
    class Drawing(sf.Neuron):
        v = sf.State()

        def step(self, x, v):
            return draw(x), (v,)

    return Drawing()


# By the name that the error gives the operation.
RANDOM = {
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn": lambda x: x + torch.randn(()),
    "randint": lambda x: x + torch.randint(0, 2, ()),
    "normal": lambda x: torch.normal(x, 1.0),
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)),
    "uniform_": lambda x: x + torch.zeros_like(x).uniform_(),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5),
}
FIX = "draw them before the call and pass them to the neuron as one more input"


@pytest.mark.parametrize("name", RANDOM)
def test_randomness_is_refused_with_the_line_and_the_fix(name):
    draw, x = RANDOM[name], torch.rand(2, 3, 4)
    drawing(draw)(x, impl="reference")
    with pytest.raises(sf.UnsupportedOperation) as caught:
        drawing(draw)(x)
    message = str(caught.value)
    line = f"{__file__}, line {draw.__code__.co_firstlineno}: "
    assert message.startswith(f"Drawing.step uses '{name}' at {line}")
    assert f"a kernel draws no random numbers, so {FIX}" in message


def test_other_dropouts():
    x = torch.rand(2, 3, 4)
    with pytest.raises(
        sf.UnsupportedOperation, match=r"Dropped.step uses 'dropout' at .*self.drop"
    ):
        Dropped()(x)
    with pytest.raises(sf.UnsupportedOperation, match=r"uses .dropout. at .*torch.dropout"):
        drawing(lambda x: torch.dropout(x, 0.5, True))(x)


def test_noise_as_an_input(backends):
    class Noisy(sf.Neuron):
        v = sf.State()

        def __init__(self):
            super().__init__()
            self.surrogate = sf.surrogate.Arctan()

        def step(self, x, noise, v):
            h = 0.5 * v + x + 0.5 * noise
            s = self.surrogate(h - 1.0)
            return s, (h * (1 - s),)

    compare(Noisy(), backends, exact=True)


def test_spikes_without_a_gradient(backends):
    class Compares(sf.Neuron):
        v = sf.State()

        def step(self, x, v):
            v = 0.5 * v + x
            return (v >= 1.0).to(v.dtype), (v,)

    x = torch.ones(3, 2, 4, device=backends.device, requires_grad=True)
    y, v = Compares()(x, outputs=("spikes", "v"))
    v.sum().backward()
    with pytest.warns(UserWarning, match=r"no output of Compares.step has a gradient.*surrogate"):
        y = Compares()(x)
    assert not y.requires_grad
