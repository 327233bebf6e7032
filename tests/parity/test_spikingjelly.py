"""Parity of neurons and surrogates with SpikingJelly."""

from __future__ import annotations

import pytest
import torch

import spikefuse as sf
from tests.parity.comparison import (
    assert_same_compiled,
    assert_same_derivative,
    assert_same_in_double,
)
from tests.parity.spikingjelly_neurons import NEURONS, SURROGATES, integrator, neuron


def cases(seeds):
    """Every neuron with the seeds that `seeds` chooses by its number of flags."""
    return [
        pytest.param(build, seed, id=f"{build.__name__}-{seed}")
        for build, flags in NEURONS.items()
        for seed in sorted(seeds(flags))
    ]


@pytest.mark.parametrize(("build", "seed"), cases(lambda flags: range(max(8, 2**flags))))
def test_neurons_in_double(build, seed):
    assert_same_in_double(build, seed)


# One combination of flags, and its opposite.
@pytest.mark.parametrize(
    ("build", "seed"), cases(lambda flags: {min(1, flags), max(0, 2**flags - 2)})
)
def test_neurons_compiled(build, seed):
    assert_same_compiled(build, seed)


def test_integrator():
    assert_same_in_double(integrator, 0, spiking=False)
    assert_same_compiled(integrator, 0)


@pytest.mark.parametrize("name", SURROGATES)
def test_surrogates(name):
    for width in (0.5, 1.0, 3.0, 8.0):
        assert_same_derivative(*SURROGATES[name](width))


def test_at_the_threshold_theirs_fires_too():
    x = torch.ones(1, 1, 1)
    assert sf.IF()(x).item() == neuron.IFNode(step_mode="m")(x).item() == 1
