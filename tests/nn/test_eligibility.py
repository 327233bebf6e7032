"""Eligibility traces: their sizes, and the layers that they know."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import spikefuse as sf
from tests.grid import on_grid


def test_steps_without_gradients_leave_traces():
    net = sf.Temporal(nn.Sequential(nn.Linear(6, 8), sf.LIF(0.9), nn.Linear(8, 2))).double()
    learner, x = sf.Online(net, "d-rtrl"), on_grid((6, 2, 6)).double().abs() * 2
    learner(x, impl="reference")[4:].sum().backward()
    expected = [p.grad for p in net.parameters()]
    net.zero_grad()
    with torch.no_grad():
        y, state = learner(x[:4], return_state=True, impl="reference")
    assert not y.requires_grad
    learner(x[4:], state=state, impl="reference").sum().backward()
    for p, b in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, b, rtol=1e-9, atol=1e-12)


def test_sizes_of_traces():
    def shapes(rule: str, *layers: nn.Module) -> list[list[tuple[int, ...] | None]]:
        learner, x = sf.Online(sf.Temporal(nn.Sequential(*layers)), rule), torch.rand(3, 2, 6)
        _, state = learner(x, return_state=True, impl="reference")
        (traces,) = state.traces.values()
        return [[None if e is None else tuple(e.shape) for e in trace] for trace in traces]

    linear, adaptive = nn.Linear(6, 8, bias=False), sf.ALIF(reset="soft")
    assert shapes("ottt", linear, sf.LIF()) == [[(2, 1, 6)]]
    assert shapes("e-prop", linear, sf.LIF(reset="soft")) == [[(2, 1, 6)]]
    assert shapes("e-prop", linear, sf.LIF()) == [[(2, 8, 6)]]
    assert shapes("d-rtrl", linear, sf.LIF(reset="soft")) == [[(2, 8, 6)]]
    assert shapes("ottt", linear, adaptive) == [[(2, 1, 6), None]]
    assert shapes("ottt", linear, sf.LIF(decay=torch.rand(8))) == [[(2, 8, 6)]]
    assert shapes("ottt", nn.Linear(6, 8), sf.LIF()) == [[(2, 1, 6)], [(2, 1, 1)]]


class Order(nn.Module):
    """What neurons receive is in the memory of a linear layer's result, in another order."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.first, self.neuron, self.in_place = nn.Linear(6, 4), sf.LIF(0.9), in_place

    def forward(self, x):
        y = self.first(x.unflatten(1, (1, 6)).expand(-1, 3, -1))  # [T*B, 3, 4]
        return self.neuron(y.relu_() if self.in_place else y.mT).flatten(1)


@pytest.mark.parametrize("in_place", [True, False])
def test_only_results_as_they_are_have_traces(in_place):
    learner = sf.Online(sf.Temporal(Order(in_place)), "ottt")
    with pytest.raises(ValueError, match=r"net.first.weight, net.first.bias reach neuron 'net"):
        learner(torch.rand(3, 2, 6), return_state=True, impl="reference")


def test_half_precision_has_traces_in_float32():
    net = sf.Temporal(nn.Sequential(nn.Linear(6, 8), sf.LIF(0.9), nn.Linear(8, 2)))
    learner, x = sf.Online(net, "d-rtrl"), on_grid((4, 2, 6)).abs() * 2
    with torch.autocast("cpu", torch.bfloat16):
        _, state = learner(x[:2], return_state=True, impl="reference")
        learner(x[2:], state=state, impl="reference").float().sum().backward()
    ((weight, bias),) = state.traces.values()
    assert [e.dtype for e in (*weight, *bias)] == [torch.float32] * 2
    assert all(p.grad.isfinite().all() for p in net.parameters())
