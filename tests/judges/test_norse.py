"""Norse's neurons and surrogates as judges of ours."""

from __future__ import annotations

import warnings

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

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
    pytest.importorskip("norse.torch", reason="Norse is not installed: see CONTRIBUTING.md")

from norse.torch.functional import iaf, lsnn
from norse.torch.functional.threshold import threshold

S = sf.surrogate

# Ours, and their method and alpha. Only some widths of theirs have the height of ours.
SURROGATES = {
    "super": (S.FastSigmoid(1.0), 100.0),  # alpha is not read
    "triangle": (S.Triangle(1.0, 0.3), 0.3),  # alpha is the height
    "tanh": (S.Sigmoid(4.0), 2.0),
}


class Cell(nn.Module):
    """One of their step functions with its parameters, time step 1."""

    def __init__(self, step, parameters, state):
        super().__init__()
        self.step, self.parameters_, self.state = step, parameters, state

    def forward(self, x, state=None):
        if state is None:
            state = self.state(*(torch.full_like(x, v) for v in self.state_values()))
        return self.step(x, state, self.parameters_, 1.0)

    def state_values(self):
        return (0.0,) * len(self.state._fields)


def firing(draw, dtype):
    """Parameters that all their threshold neurons share: (ours, theirs)."""
    v_th = draw.between(0.5, 1.2)
    method = draw.one_of(*SURROGATES)
    ours, alpha = SURROGATES[method]
    return (
        {"threshold": v_th, "surrogate": ours},
        {
            "v_th": torch.tensor(v_th, dtype=dtype),
            "method": method,
            "alpha": torch.tensor(alpha, dtype=dtype),
        },
    )


def number(value, dtype):
    return torch.tensor(value, dtype=dtype)


def integrate_and_fire(draw, dtype):
    ours, theirs = firing(draw, dtype)
    v_reset = draw.between(-0.4, 0.3)
    parameters = iaf.IAFParameters(v_reset=number(v_reset, dtype), **theirs)
    return Match(
        sf.IF(v_reset=v_reset, **ours),
        Unrolled(Cell(iaf.iaf_feed_forward_step, parameters, iaf.IAFFeedForwardState)),
    )


def adaptive(draw, dtype):
    """Without a synaptic time constant theirs is ours one step late.

    Their adaptation decays before it raises the threshold, ours after; and theirs is ours times
    their `beta`.
    """
    ours, theirs = firing(draw, dtype)
    v_reset, decay = draw.between(-0.4, 0.3), draw.between(0.3, 0.9)
    adaptation_decay, beta = draw.between(0.5, 0.98), draw.between(0.05, 0.5)
    parameters = lsnn.LSNNParameters(
        tau_syn_inv=number(1.0, dtype),
        tau_mem_inv=number(1 - decay, dtype),
        tau_adapt_inv=number(1 - adaptation_decay, dtype),
        v_reset=number(v_reset, dtype),
        beta=number(beta, dtype),
        **theirs,
    )
    return Match(
        sf.ALIF(
            decay=decay,
            adaptation_decay=adaptation_decay,
            beta=adaptation_decay * beta,
            v_reset=v_reset,
            **ours,
        ),
        OneStepLate(parameters, 1 - decay),
    )


class OneStepLate(nn.Module):
    def __init__(self, parameters, gain):
        super().__init__()
        self.p, self.gain = parameters, gain

    def forward(self, x):
        rest = torch.zeros_like(x[0])
        state = lsnn.LSNNFeedForwardState(rest, rest, self.p.v_th.expand_as(rest))
        outputs = []
        for now in torch.cat([x / self.gain, rest[None]]):
            output, state = lsnn.lsnn_feed_forward_step(now, state, self.p, 1.0)
            outputs.append(output)
        return torch.stack(outputs[1:])


NEURONS = [integrate_and_fire, adaptive]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("build", NEURONS)
def test_neurons_in_double(build, seed):
    assert_same_in_double(build, seed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("build", NEURONS)
def test_neurons_compiled(build, seed):
    assert_same_compiled(build, seed)


@pytest.mark.parametrize("method", SURROGATES)
def test_surrogates(method):
    ours, alpha = SURROGATES[method]
    assert_same_derivative(ours, lambda u: threshold(u, method, alpha))


def test_at_the_threshold_theirs_does_not_fire():
    x = torch.ones(1, 1)
    state = iaf.IAFFeedForwardState(torch.zeros(1, 1))
    assert sf.IF()(x[None]).item() == 1
    assert iaf.iaf_feed_forward_step(x, state)[0].item() == 0
