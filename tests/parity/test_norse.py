"""Parity of neurons and surrogates with Norse."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

import spikefuse as sf
from tests.parity.comparison import (
    Match,
    Unrolled,
    assert_same_compiled,
    assert_same_derivative,
    assert_same_in_double,
)

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
    norse = pytest.importorskip(
        "norse.torch", reason="Norse is not installed: see CONTRIBUTING.md"
    ).functional

S = sf.surrogate

# By their method: ours, and their alpha.
SURROGATES = {
    "super": lambda a: (S.FastSigmoid(1.0), a),  # they ignore alpha
    "triangle": lambda a: (S.Triangle(1.0, a), a),
    "heavi_erfc": lambda a: (S.Gaussian(1 / (math.sqrt(2) * a), 2 / a), a),
    "tanh": lambda a: (S.Sigmoid(4.0), 2.0),  # at other widths theirs is still 1 high
}


class Cell(nn.Module):
    """One of their step functions and its parameters, at time step 1, from states of 0."""

    def __init__(self, step, parameters, state):
        super().__init__()
        self.step, self.p, self.state = step, parameters, state

    def forward(self, x, state=None):
        if state is None:
            state = self.state(*(torch.zeros_like(x) for _ in self.state._fields))
        return self.step(x, state, self.p, 1.0)


def in_dtype(parameters, dtype, **values):
    return parameters(
        **{
            name: torch.tensor(value, dtype=dtype) if isinstance(value, float) else value
            for name, value in values.items()
        }
    )


def firing(draw):
    """Return the common arguments of threshold neurons: (ours, theirs)."""
    threshold, v_reset = draw.between(0.5, 1.2), draw.between(-0.4, 0.3)
    method = draw.one_of("super", "triangle", "tanh")  # heavi_erfc has a float32 constant
    ours, alpha = SURROGATES[method](draw.between(0.5, 3.0))
    return (
        {"threshold": threshold, "v_reset": v_reset, "surrogate": ours},
        {"v_th": threshold, "v_reset": v_reset, "method": method, "alpha": alpha},
    )


def leak(draw):
    """Return the leak, with which theirs scales the input: (ours, theirs)."""
    decay = draw.between(0.3, 0.8)
    return {"decay": decay, "decay_input": True}, {"tau_mem_inv": 1 - decay}


def integrate_and_fire(draw, dtype):
    ours, theirs = firing(draw)
    p = in_dtype(norse.iaf.IAFParameters, dtype, **theirs)
    return Match(
        sf.IF(**ours),
        Unrolled(Cell(norse.iaf.iaf_feed_forward_step, p, norse.iaf.IAFFeedForwardState)),
    )


def without_synapse(draw, dtype):
    soft = draw.flag()
    ours, theirs = firing(draw)
    our_leak, their_leak = leak(draw)
    resets = norse.reset.reset_value, norse.reset.reset_subtract
    p = in_dtype(
        norse.lif_box.LIFBoxParameters, dtype, reset_method=resets[soft], **their_leak, **theirs
    )
    step, state = norse.lif_box.lif_box_feed_forward_step, norse.lif_box.LIFBoxFeedForwardState
    return Match(
        sf.LIF(reset="soft" if soft else "hard", **our_leak, **ours),
        Unrolled(Cell(step, p, state)),
        spread=2.5,
    )


def leaky(draw, dtype):
    ours, theirs = firing(draw)
    our_leak, their_leak = leak(draw)
    current_decay = draw.between(0.2, 0.9)
    p = in_dtype(
        norse.lif.LIFParameters, dtype, tau_syn_inv=1 - current_decay, **their_leak, **theirs
    )
    return Match(
        sf.CubaLIF(current_decay, **our_leak, **ours),
        Unrolled(Cell(norse.lif.lif_feed_forward_step, p, norse.lif.LIFFeedForwardState)),
        spread=2.0,
    )


class Refractory(nn.Module):
    """Their refractory neuron without its gradient through the refractory counter."""

    def __init__(self, parameters):
        super().__init__()
        self.p = parameters

    def forward(self, x, state=None):
        if state is None:
            rest = torch.zeros_like(x)
            lif = norse.lif.LIFFeedForwardState(rest, rest)
            state = norse.lif_refrac.LIFRefracFeedForwardState(lif, rest)
        spikes, state = norse.lif_refrac.lif_refrac_feed_forward_step(x, state, self.p, 1.0)
        return spikes, state._replace(rho=state.rho.detach())


def refractory(draw, dtype):
    """Without a synapse, which theirs has: an input is gone after one step."""
    ours, theirs = firing(draw)
    our_leak, their_leak = leak(draw)
    steps = draw.one_of(1, 2, 3)
    lif = in_dtype(norse.lif.LIFParameters, dtype, tau_syn_inv=1.0, **their_leak, **theirs)
    p = norse.lif_refrac.LIFRefracParameters(lif, torch.tensor(float(steps), dtype=dtype))
    return Match(
        sf.RefractoryLIF(refractory=steps, **our_leak, **ours),
        Unrolled(Refractory(p)),
        spread=2.5,
    )


def exponential(draw, dtype):
    """Without a synapse; their rheobase is the threshold."""
    ours, theirs = firing(draw)
    decay, sharpness = draw.between(0.3, 0.8), draw.between(0.3, 1.0)
    step, state = norse.lif_ex.lif_ex_feed_forward_step, norse.lif_ex.LIFExFeedForwardState
    p = in_dtype(
        norse.lif_ex.LIFExParameters,
        dtype,
        tau_syn_inv=1.0,
        tau_mem_inv=1 - decay,
        delta_T=sharpness,
        **theirs,
    )
    return Match(
        sf.EIF(
            tau=1 / (1 - decay),
            v_rest=0.0,
            v_rheobase=ours["threshold"],
            sharpness=sharpness,
            **ours,
        ),
        Unrolled(Cell(step, p, state)),
        mean=0.5,
    )


def izhikevich(draw, dtype):
    """Their recovery follows the potential one step later, so it is decoupled here."""
    ours, theirs = firing(draw)
    rate, recovery, jump = draw.between(0.2, 0.6), draw.between(0.2, 0.9), draw.between(0.0, 0.4)
    v_rest, v_critical, a0 = draw.between(-0.2, 0.1), draw.between(0.5, 1.0), draw.between(0.5, 1.2)
    theirs["c"] = theirs.pop("v_reset")
    p = in_dtype(
        norse.izhikevich.IzhikevichParameters,
        dtype,
        a=recovery,
        b=0.0,
        d=jump,
        sq=a0,
        mn=-a0 * (v_rest + v_critical),
        bias=a0 * v_rest * v_critical,
        tau_inv=rate,
        **theirs,
    )
    step, state = norse.izhikevich.izhikevich_feed_forward_step, norse.izhikevich.IzhikevichState
    return Match(
        sf.Izhikevich(1 / rate, v_rest, v_critical, a0, 1 / (rate * recovery), 0.0, jump, **ours),
        Unrolled(Cell(step, p, state)),
        highest=1.5,
    )


class OneStepLate(nn.Module):
    """Their LSNN uses an input one step later: a step is added, and the first is dropped."""

    def __init__(self, parameters):
        super().__init__()
        self.p = parameters

    def forward(self, x):
        rest = torch.zeros_like(x[0])
        state = norse.lsnn.LSNNFeedForwardState(rest, rest, self.p.v_th.expand_as(rest))
        spikes = []
        for now in [*x, rest]:
            s, state = norse.lsnn.lsnn_feed_forward_step(now, state, self.p, 1.0)
            spikes.append(s)
        return torch.stack(spikes[1:])


def adaptive(draw, dtype):
    """Without a synapse. Their adaptation is ours times their beta, and has decayed once more
    where it raises the threshold."""
    ours, theirs = firing(draw)
    our_leak, their_leak = leak(draw)
    adaptation_decay, beta = draw.between(0.5, 0.98), draw.between(0.05, 0.5)
    p = in_dtype(
        norse.lsnn.LSNNParameters,
        dtype,
        tau_syn_inv=1.0,
        tau_adapt_inv=1 - adaptation_decay,
        beta=beta,
        **their_leak,
        **theirs,
    )
    return Match(
        sf.ALIF(
            adaptation_decay=adaptation_decay, beta=adaptation_decay * beta, **our_leak, **ours
        ),
        OneStepLate(p),
        spread=2.5,
    )


def integrator(draw, dtype):
    our_leak, their_leak = leak(draw)
    p = in_dtype(norse.leaky_integrator_box.LIBoxParameters, dtype, **their_leak)
    step = norse.leaky_integrator_box.li_box_feed_forward_step
    return Match(sf.LI(**our_leak), Unrolled(Cell(step, p, norse.leaky_integrator_box.LIBoxState)))


NEURONS = [
    integrate_and_fire,
    without_synapse,
    leaky,
    refractory,
    exponential,
    izhikevich,
    adaptive,
]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("build", NEURONS)
def test_neurons_in_double(build, seed):
    assert_same_in_double(build, seed)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("build", NEURONS)
def test_neurons_compiled(build, seed):
    assert_same_compiled(build, seed)


def test_integrator():
    assert_same_in_double(integrator, 0, spiking=False)
    assert_same_compiled(integrator, 0)


@pytest.mark.parametrize("method", SURROGATES)
def test_surrogates(method):
    for width in (0.5, 1.0, 3.0):
        ours, alpha = SURROGATES[method](width)
        assert_same_derivative(ours, lambda u, a=alpha: norse.threshold.threshold(u, method, a))


def test_at_the_threshold_theirs_does_not_fire():
    x = torch.ones(1, 1)
    state = norse.iaf.IAFFeedForwardState(torch.zeros(1, 1))
    assert sf.IF()(x[None]).item() == 1
    assert norse.iaf.iaf_feed_forward_step(x, state)[0].item() == 0
