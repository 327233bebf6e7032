"""SpikingJelly's neurons and surrogates as judges of ours."""

from __future__ import annotations

import pytest

import spikefuse as sf
from tests.judges.judging import Draw, Match, assert_same_compiled, assert_same_in_double

pytest.importorskip("spikingjelly", reason="SpikingJelly is not installed: see CONTRIBUTING.md")

from spikingjelly.activation_based import neuron, surrogate

S = sf.surrogate

# Ours and theirs, of one width.
SURROGATES = {
    "sigmoid": lambda a: (S.Sigmoid(a), surrogate.Sigmoid(a)),
    "arctan": lambda a: (S.Arctan(a), surrogate.ATan(a)),
}


def firing(draw: Draw):
    """The parameters that all their threshold neurons share: (ours, theirs).

    With a hard reset theirs also rest and leak towards `v_reset`: the same neuron as ours with
    every potential counted from there.
    """
    hard, detach = draw.flag(), draw.flag()
    threshold, v_reset = draw.between(0.5, 1.2), draw.between(-0.4, 0.3)
    ours, theirs = SURROGATES[draw.one_of("sigmoid", "arctan")](draw.between(1.0, 5.0))
    return (
        {
            "threshold": threshold - v_reset if hard else threshold,
            "reset": "hard" if hard else "soft",
            "detach_reset": detach,
            "surrogate": ours,
        },
        {
            "v_threshold": threshold,
            "v_reset": v_reset if hard else None,
            "detach_reset": detach,
            "surrogate_function": theirs,
            "step_mode": "m",
        },
    )


def integrate_and_fire(draw, dtype):
    ours, theirs = firing(draw)
    return Match(sf.IF(**ours), neuron.IFNode(**theirs))


def leaky(draw, dtype):
    ours, theirs = firing(draw)
    tau = draw.between(1.2, 4.0)
    return Match(
        sf.LIF(decay=sf.decay_from_tau(tau), **ours),
        neuron.LIFNode(tau=tau, decay_input=False, **theirs),
    )


def parametric(draw, dtype):
    ours, theirs = firing(draw)
    tau = draw.between(1.2, 4.0)
    return Match(
        sf.PLIF(decay=sf.decay_from_tau(tau), **ours),
        neuron.ParametricLIFNode(init_tau=tau, decay_input=False, **theirs),
        # Their sigmoid(w) is 1/tau, ours is 1 - 1/tau.
        {"decay.logit": ("w", -1.0)},
    )


NEURONS = [integrate_and_fire, leaky, parametric]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("build", NEURONS)
def test_neurons_in_double(build, seed):
    assert_same_in_double(build, seed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("build", NEURONS)
def test_neurons_compiled(build, seed):
    assert_same_compiled(build, seed)
