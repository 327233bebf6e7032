"""Parity of neurons and surrogates with snnTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import spikefuse as sf
from benchmarks import spoken_digits
from spikefuse.train.seeding import Purpose, reseed
from tests.parity.comparison import (
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
OTHER_SURROGATES = {
    "straight through": lambda a: (S.StraightThrough(), surrogate.straight_through_estimator()),
    "where it spikes": lambda a: (S.StraightThrough(cutoff=0.0), surrogate.heaviside()),
    "sparse": lambda a: (S.FastSigmoid(a, cutoff=-0.5), surrogate.SFS(a, -0.5)),
}


class WithGain(sf.DelayedResetLIF):
    """A neuron that scales its input."""

    def __init__(self, decay, gain, **options):
        super().__init__(decay, **options)
        self.gain = gain

    def charge(self, x, v):
        return super().charge(self.gain * x, v)


def firing(draw, dtype):
    """Return threshold and surrogate: (ours, theirs). Their surrogates support only float32."""
    threshold = draw.between(0.8, 1.2)
    name = draw.one_of(*SURROGATES)
    ours, theirs = SURROGATES[name](draw.between(1.0, 5.0))
    return (
        {"threshold": learned(threshold), "surrogate": ours},
        {
            "threshold": threshold,
            "learn_threshold": True,
            "spike_grad": ours if dtype == torch.float64 else theirs,
        },
    )


def learned(value):
    return nn.Parameter(torch.tensor(value))


def leaky(draw, dtype):
    """One step late, their reset sends no gradient; at once, it does."""
    soft, late = draw.one_of((True, False), (False, True), (False, False))
    ours, theirs = firing(draw, dtype)
    decay = draw.between(0.3, 0.9)
    return Match(
        sf.LIF(
            decay=learned(decay),
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
        mean=0.5,
        highest=0.8,
    )


def leaky_with_a_delayed_reset(draw, dtype):
    """Their default is a soft reset; hard, ours and theirs learn through the same potential."""
    soft = draw.flag()
    ours, theirs = firing(draw, dtype)
    decay = draw.between(0.3, 0.9)
    return Match(
        sf.DelayedResetLIF(learned(decay), reset="soft" if soft else "hard", **ours),
        Unrolled(
            snntorch.Leaky(
                beta=decay,
                learn_beta=True,
                reset_mechanism="subtract" if soft else "zero",
                **theirs,
            )
        ),
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


def lapicque(draw, dtype):
    ours, theirs = firing(draw, dtype)
    resistance, capacitance = draw.one_of(1.0, 1.5, 2.0), draw.one_of(1.25, 2.0, 3.0)
    return Match(
        WithGain(1 - 1 / (resistance * capacitance), 1 / capacitance, **ours),
        Unrolled(snntorch.Lapicque(R=resistance, C=capacitance, **theirs)),
        {"threshold": ("cell.threshold", 1.0)},
        mean=0.6,
        spread=2.0,
    )


def synaptic(draw, dtype):
    """With `reset_delay=True`, their default, the current of the step after a spike is lost."""
    soft = draw.flag()
    ours, theirs = firing(draw, dtype)
    current_decay, decay = draw.between(0.4, 0.6), draw.between(0.4, 0.6)
    return Match(
        sf.CubaLIF(
            learned(current_decay), learned(decay), reset="soft" if soft else "hard", **ours
        ),
        Unrolled(
            snntorch.Synaptic(
                current_decay,
                decay,
                learn_alpha=True,
                learn_beta=True,
                reset_mechanism="subtract" if soft else "zero",
                reset_delay=False,
                **theirs,
            )
        ),
        {
            "current_decay": ("cell.alpha", 1.0),
            "decay": ("cell.beta", 1.0),
            "threshold": ("cell.threshold", 1.0),
        },
        mean=0.5,
        spread=0.6,
        highest=0.45,
    )


def alpha(draw, dtype):
    """Their reset is late and loses an input, so only the first spikes are compared."""
    ours, theirs = firing(draw, dtype)
    # Exact in float32, in which theirs keeps them.
    excitatory, inhibitory = draw.one_of(0.625, 0.75, 0.875), draw.one_of(0.25, 0.5)
    return Match(
        sf.AlphaLIF(excitatory, inhibitory, detach_reset=True, **ours),
        Unrolled(snntorch.Alpha(excitatory, inhibitory, reset_mechanism="none", **theirs)),
        {"threshold": ("cell.threshold", 1.0)},
        until_first=True,
    )


NEURONS = [
    leaky,
    leaky_with_a_delayed_reset,
    integrating_subtracting_late,
    lapicque,
    synaptic,
    alpha,
]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("build", NEURONS)
def test_neurons_in_double(build, seed):
    assert_same_in_double(build, seed)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("build", NEURONS)
def test_neurons_compiled(build, seed):
    assert_same_compiled(build, seed)


@pytest.mark.parametrize("mechanism", ["subtract", "zero"])
@pytest.mark.parametrize("late", [True, False])
def test_potentials(mechanism, late):
    """A loss on the membrane has the same gradients."""
    reset = {"reset": "soft" if mechanism == "subtract" else "hard", "surrogate": S.Arctan(2.0)}
    ours = sf.DelayedResetLIF(0.8, **reset) if late else sf.LIF(0.8, **reset)
    theirs = snntorch.Leaky(beta=0.8, reset_mechanism=mechanism, reset_delay=late)
    # They lower a potential that is above the threshold after the reset a second time.
    x = torch.randn(20, 4, 5, generator=torch.Generator().manual_seed(0)).clamp(max=0.9)
    x.requires_grad_()
    spikes, v = ours(x, outputs=("spikes", "v"))
    expected, mem = [], torch.zeros(4, 5)
    for now in x:
        spike, mem = theirs(now, mem)
        expected.append((spike, mem))
    wanted, potential = map(torch.stack, zip(*expected, strict=True))
    assert torch.equal(spikes, wanted)
    assert 0.02 < spikes.mean() < 0.5
    torch.testing.assert_close(v, potential)
    found, other = (torch.autograd.grad((y - 0.3).square().mean(), x)[0] for y in (v, potential))
    torch.testing.assert_close(found, other)


@pytest.mark.parametrize("name", SURROGATES | OTHER_SURROGATES)
def test_surrogates(name):
    for width in (0.5, 1.0, 3.0, 8.0):
        assert_same_derivative(*(SURROGATES | OTHER_SURROGATES)[name](width))


def test_at_the_threshold_theirs_does_not_fire():
    x = torch.ones(1, 1)
    assert sf.IF()(x[None]).item() == 1
    assert snntorch.Leaky(beta=1.0)(x)[0].item() == 0


def test_the_network_on_spoken_digits_is_the_same() -> None:
    """Outputs and gradients of the benchmark's loops equal those of our layers."""
    spikes = (torch.rand(12, 3, 700, generator=torch.Generator().manual_seed(0)) < 0.1).float()
    outputs, gradients = {}, {}
    for name in (spoken_digits.OURS, spoken_digits.SNNTORCH):
        reseed(0, Purpose.WEIGHTS)
        net = spoken_digits.make_network(name, [32, 24], len(spikes))
        reseed(0, Purpose.STEP)  # of dropout
        outputs[name] = net(spikes)
        outputs[name].square().sum().backward()
        gradients[name] = [p.grad for p in net.parameters()]
    ours, theirs = spoken_digits.OURS, spoken_digits.SNNTORCH
    torch.testing.assert_close(outputs[ours], outputs[theirs], rtol=1e-4, atol=1e-6)
    assert len(gradients[ours]) == len(gradients[theirs])
    for one, other in zip(gradients[ours], gradients[theirs], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
