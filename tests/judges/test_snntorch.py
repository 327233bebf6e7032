"""snnTorch's neurons and surrogates as judges of ours."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import spikefuse as sf
from tests.judges.judging import (
    Match,
    Unrolled,
    assert_same_compiled,
    assert_same_derivative,
    assert_same_in_double,
)

REASON = "snnTorch is not installed: see CONTRIBUTING.md"
snntorch = pytest.importorskip("snntorch", reason=REASON)
surrogate = pytest.importorskip("snntorch.surrogate", reason=REASON)
S = sf.surrogate

# Ours and theirs, of one width.
SURROGATES = {
    "sigmoid": lambda a: (S.Sigmoid(a), surrogate.sigmoid(a)),
    "arctan": lambda a: (S.Arctan(a), surrogate.atan(a)),
    "fast sigmoid": lambda a: (S.FastSigmoid(a), surrogate.fast_sigmoid(a)),
}


class Delayed(sf.Neuron):
    """Their default, `reset_mechanism="subtract"` one step late: the threshold that comes off has
    not decayed, and no gradient flows through it."""

    v, s = sf.State(), sf.State()

    def __init__(self, decay, threshold, surrogate):
        super().__init__()
        self.decay, self.threshold, self.surrogate = decay, threshold, surrogate

    def step(self, x, v, s):
        v = self.decay * v + x - s.detach() * self.threshold
        s = self.surrogate(v - self.threshold)
        return s, (v, s)


def firing(draw, dtype):
    """Threshold and surrogate: (ours, theirs). Their surrogates compute in float32 only."""
    threshold = draw.between(0.8, 1.2)
    name = draw.one_of(*SURROGATES)
    ours, theirs = SURROGATES[name](draw.between(1.0, 5.0))
    return (
        {"threshold": nn.Parameter(torch.tensor(threshold)), "surrogate": ours},
        {
            "threshold": threshold,
            "learn_threshold": True,
            "spike_grad": ours if dtype == torch.float64 else theirs,
        },
    )


def leaky(draw, dtype):
    """Late, their reset sends no gradient; at once, it does."""
    soft, late = draw.flag(), draw.flag()
    ours, theirs = firing(draw, dtype)
    decay = draw.between(0.3, 0.9)
    if soft:
        late = False
    return Match(
        sf.LIF(
            decay=nn.Parameter(torch.tensor(decay)),
            reset="soft" if soft else "hard",
            detach_reset=late,
            **ours,
        ),
        Unrolled(
            snntorch.Leaky(
                beta=decay,
                learn_beta=True,
                reset_mechanism="subtract" if soft else "zero",
                reset_delay=late,
                **theirs,
            )
        ),
        {"decay": ("cell.beta", 1.0), "threshold": ("cell.threshold", 1.0)},
        # They lower a potential that is above the threshold after the reset a second time.
        highest=0.8,
    )


def leaky_subtracting_late(draw, dtype):
    ours, theirs = firing(draw, dtype)
    decay = draw.between(0.3, 0.9)
    return Match(
        Delayed(decay=nn.Parameter(torch.tensor(decay)), **ours),
        Unrolled(snntorch.Leaky(beta=decay, learn_beta=True, **theirs)),
        {"decay": ("cell.beta", 1.0), "threshold": ("cell.threshold", 1.0)},
    )


def integrating_subtracting_late(draw, dtype):
    """Without decay a late subtraction is an early one."""
    ours, theirs = firing(draw, dtype)
    return Match(
        sf.IF(reset="soft", detach_reset=True, **ours),
        Unrolled(snntorch.Leaky(beta=1.0, **theirs)),
        {"threshold": ("cell.threshold", 1.0)},
    )


NEURONS = [leaky, leaky_subtracting_late, integrating_subtracting_late]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("build", NEURONS)
def test_neurons_in_double(build, seed):
    assert_same_in_double(build, seed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("build", NEURONS)
def test_neurons_compiled(build, seed):
    assert_same_compiled(build, seed)


@pytest.mark.parametrize("name", SURROGATES)
def test_surrogates(name):
    for width in (0.5, 1.0, 3.0, 8.0):
        assert_same_derivative(*SURROGATES[name](width))


def test_at_the_threshold_theirs_does_not_fire():
    x = torch.ones(1, 1)
    assert sf.IF()(x[None]).item() == 1
    assert snntorch.Leaky(beta=1.0)(x)[0].item() == 0
