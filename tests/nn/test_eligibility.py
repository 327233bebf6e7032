"""Eligibility traces: their sizes, and the layers that they know."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf
from spikefuse.nn.online import OnlineState
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


def learner_of(neuron: sf.Neuron) -> sf.Online:
    torch.manual_seed(0)
    net = sf.Temporal(nn.Sequential(nn.Linear(6, 8), neuron, nn.Linear(8, 2)))
    return sf.Online(net.double(), "d-rtrl")


def part(learner: sf.Online, i: int, state: OnlineState | None) -> tuple[Tensor, OnlineState]:
    """The outputs and the state of one of three parts."""
    x = on_grid((6, 2, 6)).double().abs()[2 * i : 2 * i + 2] * 2
    return learner(x, state=state, return_state=True, impl="reference")


def tensors_of(state: OnlineState) -> list[Tensor]:
    traces = [e for found in state.carried.all().values() for trace in found for e in trace]
    return [e for e in traces if e is not None]


def expected_traces(neuron: sf.Neuron) -> list[Tensor]:
    """After three parts without backward passes."""
    state = None
    with torch.no_grad():
        for i in range(3):
            _, state = part(learner_of(neuron), i, state)
    return tensors_of(state)


@pytest.mark.parametrize("neuron", [sf.LIF(0.9), sf.ALIF(0.9)])
def test_backward_overwrites_traces_that_nobody_holds(neuron):
    learner, state, places = learner_of(neuron), None, []
    for i in range(3):
        y, state = part(learner, i, state)
        y.sum().backward()
        places.append({e.data_ptr() for e in tensors_of(state)})
    assert places[1] & places[2]
    for a, b in zip(tensors_of(state), expected_traces(neuron), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("held", ["state", "copy", "tensors", "tuple", "call"])
def test_backward_leaves_traces_that_others_hold(held):
    def gradients(learner: sf.Online, state: OnlineState) -> list[Tensor]:
        learner.zero_grad()
        y, _ = part(learner, 2, state)
        y.sum().backward()
        return [p.grad for p in learner.parameters()]

    def two_parts(learner: sf.Online) -> OnlineState:
        learner.zero_grad()
        state = None
        for i in range(2):
            y, state = part(learner, i, state)
            y.sum().backward()
        return state

    learner = learner_of(sf.LIF(0.9))
    expected, state = gradients(learner, two_parts(learner)), two_parts(learner)
    before = [e.clone() for e in tensors_of(state)]
    other = {
        "state": lambda: state,
        "copy": lambda: copy.copy(state),
        "tensors": lambda: OnlineState(state.states, state.traces, "d-rtrl"),
        "tuple": lambda: OnlineState(*state),
        "call": lambda: part(learner, 2, state)[0].sum(),
    }[held]()
    learner.zero_grad()
    y, state = part(learner, 2, state)
    y.sum().backward()
    if held == "call":
        learner.zero_grad()
        other.backward()
        found = [p.grad for p in learner.parameters()]
    else:
        for a, b in zip(tensors_of(other), before, strict=True):
            assert torch.equal(a, b)
        found = gradients(learner, other)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_state_of_a_call_that_another_overtakes():
    learner, expected = learner_of(sf.LIF(0.9)), expected_traces(sf.LIF(0.9))
    y, state = part(learner, 0, None)
    y.sum().backward()
    y, state = part(learner, 1, state)
    y.sum().backward()
    y, other = part(learner, 2, state)  # whose graph is dropped
    y, state = part(learner, 2, state)
    y.sum().backward()
    for found in (tensors_of(state), tensors_of(other)):
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_before_backward_have_traces(copied):
    learner, expected = learner_of(sf.LIF(0.9)), expected_traces(sf.LIF(0.9))
    state = None
    for i in range(3):
        y, state = part(learner, i, state)
        twin = copied(state)
        y.sum().backward()
    for found in (tensors_of(twin), tensors_of(state)):
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
    assert twin.traces.keys() == {"net.1"}


def test_inputs_that_change_before_traces_are_computed():
    learner, x, state = learner_of(sf.LIF(0.9)), torch.rand(2, 2, 6).double(), None
    options = {"return_state": True, "impl": "reference"}
    _, state = learner(x, **options)
    _, state = learner(x, state=state, **options)
    x.mul_(2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"an input of neuron 'net.1', .* first call back"):
            learner(x, state=state, **options)
