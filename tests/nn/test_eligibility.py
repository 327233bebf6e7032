"""Eligibility traces: their sizes, and the layers that they know."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf
from spikefuse.nn.nesting import flatten
from spikefuse.nn.online import OnlineState
from spikefuse.transforms.graph_step import CONSTANTS
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


def learner_in_place(neuron: sf.Neuron, in_place: bool = True) -> sf.Online:
    torch.manual_seed(0)
    net = sf.Temporal(nn.Sequential(nn.Linear(6, 8), neuron, nn.Linear(8, 2)))
    return sf.Online(net.double(), "d-rtrl", in_place=in_place)


def run_part(learner: sf.Online, i: int, state: OnlineState | None) -> tuple[Tensor, OnlineState]:
    """The outputs and the state of one of three parts."""
    x = on_grid((6, 2, 6)).double().abs()[2 * i : 2 * i + 2] * 2
    return learner(x, state=state, return_state=True, impl="reference")


def tensors_of(state: OnlineState) -> list[Tensor]:
    found = [e for traces in state.traces.values() for trace in traces for e in trace]
    return [e for e in found if e is not None]


class Coupled(sf.Neuron):
    """Each of two states depends on both before."""

    v, w = sf.State(), sf.State()

    def step(self, x, v, w):
        v_next, w_next = 0.75 * v - 0.25 * w + x, 0.5 * w + 0.125 * v * v
        return v_next, (v_next, w_next)


@pytest.mark.parametrize("neuron", [sf.LIF(0.9), sf.ALIF(0.9), Coupled()])
def test_traces_in_place(neuron):
    def run(in_place: bool) -> tuple[list[Tensor], list[set[int]]]:
        learner, state, places = learner_in_place(neuron, in_place), None, []
        for i in range(3):
            with torch.set_grad_enabled(i != 2):
                y, state = run_part(learner, i, state)
            if i != 2:
                y.sum().backward()
            places.append({e.data_ptr() for e in tensors_of(state)})
        learner(on_grid((2, 2, 6)).double(), state=state, impl="reference").sum().backward()
        return [*(p.grad for p in learner.parameters()), *tensors_of(state)], places

    found, places = run(True)
    for a, b in zip(found, run(False)[0], strict=True):
        assert torch.equal(a, b)
    assert places[0] & places[1]


def after_one_part() -> tuple[sf.Online, OnlineState]:
    learner = learner_in_place(sf.LIF(0.9))
    y, state = run_part(learner, 0, None)
    y.sum().backward()
    return learner, state


def fail(grad: Tensor) -> Tensor:
    raise OSError("as a test wants")


def test_traces_that_are_not_those_after_a_part():
    learner, first = after_one_part()
    y, second = run_part(learner, 1, first)
    early = copy.deepcopy(second)
    for state in (first, second):
        with pytest.raises(RuntimeError, match=r"traces of neuron 'net.1' .* call backward\(\)"):
            run_part(learner, 2, state)
    y.sum().backward()
    for state in (first, early):
        with pytest.raises(RuntimeError, match=r"traces of neuron 'net\.1'"):
            run_part(learner, 2, state)
    run_part(learner, 2, second)[0].sum().backward()


def test_backward_that_fails_leaves_no_old_traces():
    learner, first = after_one_part()
    y, second = run_part(learner, 1, first)
    y.register_hook(fail)
    with pytest.raises(OSError, match="as a test wants"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match=r"traces of neuron 'net\.1'"):
        run_part(learner, 2, second)


def test_calls_that_fail_leave_the_state():
    learner, state = after_one_part()
    with pytest.raises(RuntimeError, match="shapes"):
        learner(torch.ones(2, 2, 5).double(), state=state, return_state=True)
    run_part(learner, 1, state)


def test_backward_after_another_has_overwritten_the_traces():
    learner, state = after_one_part()
    late = learner(torch.ones(2, 2, 6).double(), state=state, impl="reference")
    run_part(learner, 1, state)[0].sum().backward()
    with pytest.raises(RuntimeError, match="changed in place before its backward pass"):
        late.sum().backward()


@pytest.mark.parametrize("when", ["before", "after"])
def test_traces_that_are_replaced(when):
    """A state that is built anew before backward may hold tensors that backward has replaced."""
    learner, state = learner_in_place(sf.ALIF(0.9)), None
    for i in range(2):
        y, state = run_part(learner, i, state)
        traces = {name: [[*trace] for trace in own] for name, own in state.traces.items()}
        if when == "before":
            state = state._replace(traces=traces)
        y.sum().backward()
        if when == "after":
            state = state._replace(traces=traces)
        with pytest.raises(RuntimeError, match="with in_place=True, pass the state as it was"):
            run_part(learner, 2, state)
        state = state._replace(traces=state.pending.traces)


def test_a_state_whose_traces_may_not_be_overwritten():
    """It does not know when that happens."""
    learner = learner_in_place(sf.ALIF(0.9))
    _, state = run_part(learner_in_place(sf.ALIF(0.9), in_place=False), 0, None)
    with pytest.raises(ValueError, match="state is of an Online without in_place=True"):
        run_part(learner, 1, state)


def test_a_recorded_step_takes_a_state():
    _, state = run_part(learner_in_place(sf.ALIF(0.9), in_place=False), 0, None)
    values, _ = flatten(state)
    assert len(values) > 4
    assert all(isinstance(x, Tensor | CONSTANTS) for x in values)


def test_a_call_without_backward_frees_its_graph():
    learner, state = after_one_part()
    y, state = run_part(learner, 1, state)
    trace = weakref.ref(tensors_of(state)[0])
    gc.disable()
    try:
        del y, state
        assert trace() is None
    finally:
        gc.enable()


def test_parts_whose_outputs_need_no_backward():
    learner, state = after_one_part()
    net = learner.net.net
    net[2].register_forward_hook(lambda layer, inputs, y: y.detach())
    _, state = run_part(learner, 1, state)
    run_part(learner, 2, state)
