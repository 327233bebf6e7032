"""Neurons with candidates: marks agree with the potential, and gradients with the neuron's."""

from __future__ import annotations

import pytest
import torch

import spikefuse as sf
from spikefuse.events.candidates import with_candidates
from spikefuse.events.lists import FIRED, NEAR


def lif() -> sf.LIF:
    return sf.LIF(0.9, 0.8, surrogate=sf.surrogate.Triangle(cutoff=-0.2))


@pytest.mark.parametrize("impl", ["numba", "reference"])
def test_marks_and_gradients(impl: str) -> None:
    torch.manual_seed(0)
    neuron, x = lif(), torch.rand(15, 3, 40).requires_grad_()
    marks, spikes = (n(x, impl=impl) for n in (with_candidates(neuron), neuron))
    h, potentials = torch.zeros(3, 40), []
    for now, s in zip(x.detach(), spikes, strict=True):
        h = 0.9 * h + now
        potentials.append(h)
        h = h * (1 - s)
    above = torch.stack(potentials) - 0.8 >= -0.2
    assert above.any()
    assert torch.equal(marks, torch.where(spikes > 0, FIRED, above * NEAR))
    grad = torch.rand_like(x)
    found = [torch.autograd.grad(y, x, grad)[0] for y in (marks, spikes)]
    assert torch.equal(*found)


def test_values_are_shared() -> None:
    neuron = sf.PLIF(0.5, surrogate=sf.surrogate.Triangle(cutoff=-0.2))
    assert list(with_candidates(neuron).parameters()) == list(neuron.parameters())


def test_a_neuron_that_is_changed() -> None:
    """A copy is reused until the neuron changes."""
    neuron = lif()
    known = with_candidates(neuron)
    assert with_candidates(neuron) is known
    x = torch.rand(15, 3, 40)
    for name, value in (("threshold", 0.4), ("surrogate", sf.surrogate.Triangle(cutoff=-0.3))):
        setattr(neuron, name, value)
        other = with_candidates(neuron)
        assert not torch.equal(other(x), known(x))
        assert torch.equal(other(x) == FIRED, neuron(x) > 0)
    neuron.surrogate.cutoff = 0.5
    with pytest.raises(ValueError, match=r"cutoff 0\.5"):
        with_candidates(neuron)


class Twice(sf.LIF):
    def step(self, x, v):
        s = self.surrogate(x + v) * self.surrogate(x)
        return s, (v,)


def test_two_surrogates() -> None:
    neuron = Twice(surrogate=sf.surrogate.Triangle(cutoff=-0.2))
    with pytest.raises(TypeError, match="calls its surrogate 2 times"):
        with_candidates(neuron)


class Changed(sf.LIF):
    """Its output is computed from the spike."""

    def __init__(self, function):
        super().__init__(surrogate=sf.surrogate.Triangle(cutoff=-0.2))
        self.function = function

    def step(self, x, v):
        s, (v,) = super().step(x, v)
        return self.function(s, v, x), (v,)


@pytest.mark.parametrize(
    "function",
    [
        lambda s, v, x: 1 - s,
        lambda s, v, x: 2 * s,
        lambda s, v, x: -s,
        lambda s, v, x: s * x,
        lambda s, v, x: v,
        lambda s, v, x: torch.where(x > 0.5, s, 1.0),
        lambda s, v, x: (s, v),
    ],
    ids=["1 - s", "2 * s", "-s", "s * x", "v", "or", "two"],
)
def test_output_that_is_not_the_spike(function) -> None:
    neuron = Changed(function)
    with pytest.raises(TypeError, match=r"Changed.step does not return its spike as its only out"):
        with_candidates(neuron)
    with pytest.raises(TypeError, match=r"use nn\.Linear and the neuron"):
        sf.nn.EventLinear(4, 3, neuron)


@pytest.mark.parametrize(
    "function",
    [lambda s, v, x: s * (x > 0.5), lambda s, v, x: torch.where(x < 0.3, 0.0, s)],
    ids=["mask", "where"],
)
def test_spikes_that_are_masked(function) -> None:
    neuron, x = Changed(function), torch.rand(15, 3, 40).requires_grad_()
    marks, spikes = with_candidates(neuron)(x), neuron(x)
    assert spikes.any()
    assert torch.equal(marks == FIRED, spikes > 0)
    grad = torch.rand_like(x)
    found = [torch.autograd.grad(y, x, grad)[0] for y in (marks, spikes)]
    assert torch.equal(*found)


def test_no_cutoff() -> None:
    with pytest.raises(ValueError, match="cutoff None: expected a float of at most 0"):
        with_candidates(sf.LIF())
    with pytest.raises(ValueError, match=r"cutoff 0\.5"):
        with_candidates(sf.LIF(surrogate=sf.surrogate.Triangle(cutoff=0.5)))
    with pytest.raises(TypeError, match="LI does not fire 0 or 1"):
        with_candidates(sf.LI())
