"""Neurons and surrogates of ours with those of SpikingJelly that must compute the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import spikefuse as sf
from tests.parity.comparison import Draw, Match

REASON = "SpikingJelly is not installed: see CONTRIBUTING.md"
neuron = pytest.importorskip("spikingjelly.activation_based.neuron", reason=REASON)
surrogate = pytest.importorskip("spikingjelly.activation_based.surrogate", reason=REASON)
S = sf.surrogate

# Ours and theirs, of one width.
SURROGATES = {
    "sigmoid": lambda a: (S.Sigmoid(a), surrogate.Sigmoid(a)),
    "arctan": lambda a: (S.Arctan(a), surrogate.ATan(a)),
    "rectangle": lambda a: (S.Rectangle(-0.5 / a, 0.5 / a, a), surrogate.Rect(a)),
    "piecewise quadratic": lambda a: (S.PiecewiseQuadratic(a), surrogate.PiecewiseQuadratic(a)),
    "triangle": lambda a: (S.Triangle(1 / a, a), surrogate.PiecewiseQuadratic(a)),
    "erf": lambda a: (S.Erf(a), surrogate.Erf(a)),
    "SuperSpike": lambda a: (S.FastSigmoid(1.0, a), surrogate.SuperSpike(a)),
    "soft sign": lambda a: (S.FastSigmoid(a, a / 2), surrogate.SoftSign(a)),
}


def firing(draw: Draw):
    """Return the common arguments of threshold neurons that reset to 0: (ours, theirs)."""
    hard, detach = draw.flag(), draw.flag()
    threshold = draw.between(0.5, 1.2)
    ours, theirs = SURROGATES[draw.one_of("sigmoid", "arctan")](draw.between(1.0, 4.0))
    return (
        {
            "threshold": threshold,
            "reset": "hard" if hard else "soft",
            "detach_reset": detach,
            "surrogate": ours,
        },
        {
            "v_threshold": threshold,
            "v_reset": 0.0 if hard else None,
            "detach_reset": detach,
            "surrogate_function": theirs,
            "step_mode": "m",
        },
    )


def resting_at_reset(draw: Draw):
    """Theirs leak towards `v_reset` and start there: ours, with potentials counted from there."""
    ours, theirs = firing(draw)
    v_reset = draw.between(-0.4, 0.3)
    if theirs["v_reset"] is not None:
        theirs["v_reset"] = v_reset
        ours["threshold"] -= v_reset
    return ours, theirs


def starting_at_reset(draw: Draw, *others: float):
    """Theirs start at `v_reset`, ours at 0: (ours, theirs, our state)."""
    ours, theirs = firing(draw)
    v_reset = draw.between(-0.4, 0.0)
    if theirs["v_reset"] is not None:
        theirs["v_reset"] = ours["v_reset"] = v_reset
    return ours, theirs, (theirs["v_reset"] or 0.0, *others)


def leak(draw: Draw):
    """(ours, theirs)"""
    tau, decay_input = draw.between(1.2, 4.0), draw.flag()
    return (
        {"decay": sf.decay_from_tau(tau), "decay_input": decay_input},
        {"tau": tau, "decay_input": decay_input},
    )


def integrate_and_fire(draw, dtype):
    ours, theirs, state = starting_at_reset(draw)
    return Match(sf.IF(**ours), neuron.IFNode(**theirs), state=state)


def leaky(draw, dtype):
    ours, theirs = resting_at_reset(draw)
    our_leak, their_leak = leak(draw)
    return Match(sf.LIF(**our_leak, **ours), neuron.LIFNode(**their_leak, **theirs), spread=1.5)


def parametric(draw, dtype):
    ours, theirs = resting_at_reset(draw)
    our_leak, their_leak = leak(draw)
    match = Match(
        sf.PLIF(**our_leak, **ours),
        neuron.ParametricLIFNode(init_tau=their_leak.pop("tau"), **their_leak, **theirs),
        # Their sigmoid(w) is 1/tau, ours is 1 - 1/tau.
        {"decay.logit": ("w", -1.0)},
        spread=1.5,
    )
    match.theirs.w.data = -match.ours.decay.logit.data
    return match


def scaled(draw, dtype):
    """KLIF; its relu leaves no room for another resting potential."""
    ours, theirs = firing(draw)
    our_leak, their_leak = leak(draw)
    scale_reset, k = draw.flag(), draw.between(0.7, 1.6)
    match = Match(
        sf.KLIF(k=k, scale_reset=scale_reset, **our_leak, **ours),
        neuron.KLIFNode(scale_reset=scale_reset, **their_leak, **theirs),
        {"k": ("k", 1.0)},
        spread=1.5,
    )
    match.theirs.k.data.fill_(k)
    return match


def ternary(draw, dtype):
    ours, theirs = firing(draw)
    our_leak, their_leak = leak(draw)
    return Match(
        sf.TernaryLIF(**our_leak, **ours),
        neuron.TernaryLIFNode(**their_leak, **theirs),
        mean=0.0,
        spread=1.5,
    )


def integer(draw, dtype):
    detach, levels = draw.flag(), draw.one_of(2, 4)
    tau, threshold = draw.between(1.2, 4.0), draw.between(0.5, 1.2)
    decay = sf.decay_from_tau(tau)
    return Match(
        sf.IntegerLIF(decay, threshold, levels, detach_reset=detach),
        neuron.ILIFNode(
            tau, threshold, surrogate.MultiLevelSpikeCount(levels), detach, step_mode="m"
        ),
        spread=1.5,
    )


def current_based(draw, dtype):
    ours, theirs, state = starting_at_reset(draw, 0.0)
    current_decay, decay = draw.between(0.2, 0.8), draw.between(0.2, 0.9)
    theirs.pop("step_mode")
    detach = theirs.pop("detach_reset")
    match = Match(
        sf.CubaLIF(current_decay, decay, **ours),
        neuron.CUBALIFNode(current_decay, decay, **theirs),
        state=state,
        mean=0.1,
    )
    # No arguments of theirs, but attributes.
    match.theirs.step_mode, match.theirs.detach_reset = "m", detach
    return match


def complementary(draw, dtype):
    tau, threshold, width = draw.between(1.2, 4.0), draw.between(0.5, 1.2), draw.between(1.0, 3.0)
    ours, theirs = SURROGATES[draw.one_of("sigmoid", "rectangle")](width)
    return Match(
        sf.CLIF(sf.decay_from_tau(tau), threshold, surrogate=ours),
        neuron.ComplementaryLIFNode(tau, threshold, theirs, step_mode="m"),
    )


def quadratic_parameters(draw):
    return [draw.between(1.5, 4.0), draw.between(0.5, 1.0), draw.between(0.5, 1.2)]


def quadratic(draw, dtype):
    ours, theirs, state = starting_at_reset(draw)
    tau, v_critical, a0 = quadratic_parameters(draw)
    v_rest = draw.between(0.0, 0.2)
    return Match(
        sf.QIF(tau, v_rest, v_critical, a0, **ours),
        neuron.QIFNode(tau, v_critical, a0, v_rest=v_rest, **theirs),
        state=state,
        highest=1.5,
    )


def exponential(draw, dtype):
    ours, theirs, state = starting_at_reset(draw)
    tau, v_rest = draw.between(1.5, 4.0), draw.between(0.0, 0.2)
    sharpness, v_rheobase = draw.between(0.3, 1.0), draw.between(0.6, 1.0)
    return Match(
        sf.EIF(tau, v_rest, v_rheobase, sharpness, **ours),
        neuron.EIFNode(tau, sharpness, v_rheobase, v_rest=v_rest, **theirs),
        state=state,
        highest=1.5,
    )


def izhikevich(draw, dtype):
    ours, theirs, state = starting_at_reset(draw, 0.0)
    tau, v_critical, a0 = quadratic_parameters(draw)
    v_rest, tau_recovery = draw.between(0.0, 0.2), draw.between(1.5, 4.0)
    coupling, jump = draw.between(0.0, 0.4), draw.between(0.0, 0.4)
    return Match(
        sf.Izhikevich(tau, v_rest, v_critical, a0, tau_recovery, coupling, jump, **ours),
        neuron.IzhikevichNode(
            tau=tau,
            v_c=v_critical,
            a0=a0,
            v_rest=v_rest,
            tau_w=tau_recovery,
            a=coupling,
            b=jump,
            **theirs,
        ),
        state=state,
        highest=1.5,
    )


GATES = ("alpha", "beta", "gamma")
GATED = {
    **{gate: gate for gate in GATES},
    **{"decay": "tau", "threshold": "v_threshold", "leak": "linear_decay"},
    **{"drop": "v_subreset", "conductance": "conduct"},
}


def gated(draw, dtype):
    """Their conductance has a value for each time step: here they are equal."""
    steps, channels = 12, 3
    ours, theirs = SURROGATES["sigmoid"](draw.between(1.0, 4.0))
    match = Match(
        sf.GatedLIF(channels=channels, surrogate=ours),
        neuron.GatedLIFNode(steps, channels, surrogate_function=theirs),
        {f"{name}.logit": (theirs, 1.0) for name, theirs in GATED.items()},
        shape=(steps, 2, channels, 5, 4),
    )
    for name, (their_name, _) in match.parameters.items():
        logits = match.ours.get_parameter(name)
        for channel in range(channels):
            logits.data[channel] = math.log(draw.between(0.2, 0.8) / draw.between(0.2, 0.8))
        match.theirs.get_parameter(their_name).data.copy_(logits)
    return match


class Stacked(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return torch.stack(self.module(x))


def integrator(draw, dtype):
    tau = draw.between(1.2, 4.0)
    return Match(
        sf.LI(sf.decay_from_tau(tau), decay_input=True), Stacked(neuron.NonSpikingLIFNode(tau))
    )


# With the number of flags that each draws.
NEURONS = {
    integrate_and_fire: 2,
    leaky: 3,
    parametric: 3,
    scaled: 4,
    ternary: 3,
    integer: 1,
    current_based: 2,
    complementary: 0,
    quadratic: 2,
    exponential: 2,
    izhikevich: 2,
    gated: 0,
}
