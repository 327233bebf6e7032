"""The contract of a neuron: states, inputs, the step and its errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import pytest
import torch
from torch import Tensor

from spikefuse import LIF, Neuron, State, surrogate
from spikefuse.neurons.definition import call_step, channel_view


class Two(Neuron):
    v, a = State(), State(0.5)

    def __init__(self, decay: Any = 0.5, mode: str = "plain") -> None:
        super().__init__()
        self.decay, self.mode = decay, mode
        self.surrogate = surrogate.Sigmoid(3.0)

    def step(self, x: Tensor, z: Tensor, v: Tensor, a: Tensor) -> Any:
        return self.surrogate(self.decay * v + x), (z, a)


def test_inputs_and_states_by_name() -> None:
    assert Two.input_names == ("x", "z")
    assert list(Two.states) == ["v", "a"]
    assert [s.initial for s in Two.states.values()] == [0.0, 0.5]


def test_states_of_base_classes_come_first() -> None:
    class Base(Neuron):
        v = State()

    class Derived(Base):
        u = State()

        def step(self, x: Tensor, v: Tensor, u: Tensor) -> Any:
            return x, (v, u)

    assert list(Derived.states) == ["v", "u"]
    assert Base.input_names == ()


@pytest.mark.parametrize(
    "arguments", ["x, a, v", "v, a", "x, v", "x, v, a, extra", "v, a, x"], ids=str
)
def test_step_must_take_inputs_then_states(arguments: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def step(self, {arguments}): ...", scope)
    members = {"v": State(), "a": State(), "step": scope["step"]}
    with pytest.raises(TypeError, match=rf"Wrong\.step takes \({arguments}\).*write step\(self, x"):
        type("Wrong", (Neuron,), members)


def test_without_a_step() -> None:
    class Empty(Neuron):
        pass

    with pytest.raises(NotImplementedError, match="Empty does not define step"):
        Empty().step()
    with pytest.raises(NotImplementedError, match="Empty does not define step"):
        Empty()(torch.rand(2, 3))


def test_call_step_makes_tuples() -> None:
    x = torch.ones(1)
    outputs, states = call_step(Two(), (x, x), (x, x))
    assert [len(outputs), len(states)] == [1, 2]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda x: x, r"must return \(output, \(new v,\)\); it returned Tensor"),
        (lambda x: (x, x), r"must .* its second item is a Tensor: write \(v,\)"),
        (lambda x: (x, x, x), r"must return .*; it returned tuple"),
        (lambda x: (x, (x, x)), r"returned 2 new states, but 1 are declared \(v\)"),
        (lambda x: (x, ()), r"returned 0 new states"),
        (lambda x: (1.0, (x,)), r"returned a float among its tensors"),
        (lambda x: ((x, None), (x,)), r"returned a NoneType among its tensors"),
    ],
)
def test_wrong_results_of_step(result: Any, message: str) -> None:
    class Wrong(Neuron):
        v = State()

        def step(self, x: Tensor, v: Tensor) -> Any:
            return result(x)

    with pytest.raises(TypeError, match=r"Wrong\.step " + message):
        call_step(Wrong(), (torch.ones(1),), (torch.ones(1),))


def test_channel_view() -> None:
    scalar = torch.tensor(1.0)
    assert channel_view("p", scalar, torch.Size([2])) is scalar
    assert channel_view("p", torch.ones(3), torch.Size([2, 3])).shape == (3,)
    assert channel_view("p", torch.ones(3), torch.Size([2, 3, 5, 7])).shape == (3, 1, 1)


@pytest.mark.parametrize(
    ("value", "step"), [((1,), (2, 3)), ((2,), (2, 3)), ((1, 3), (2, 3)), ((3,), (3,))]
)
def test_channel_view_of_a_wrong_shape(value: tuple[int, ...], step: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"parameter 'p' has shape .* one value per channel"):
        channel_view("p", torch.ones(value), torch.Size(step))


def test_an_abstract_base() -> None:
    class Base(Neuron, ABC):
        @abstractmethod
        def gain(self) -> float: ...

    with pytest.raises(TypeError, match="abstract"):
        Base()
    assert type("Concrete", (Base,), {"gain": lambda self: 1.0})().gain() == 1.0


def test_a_state_without_parentheses() -> None:
    with pytest.raises(TypeError, match=r"Wrong\.v is the class State: write State\(\)"):
        type("Wrong", (Neuron,), {"v": State, "step": lambda self, x, v: (x, (v,))})


def test_states_are_not_assigned() -> None:
    """As users of other libraries reset neurons."""
    neuron = LIF()
    with pytest.raises(AttributeError, match=r"LIF.v is a state.*pass another value as state="):
        neuron.v = 0.5
    neuron.v_reset = 0.5


def test_states_as_a_tuple_of_arguments():
    class Chain(Neuron):
        a, b, c = State(), State(0.5), State()

        def step(self, x, *states):
            return sum(states) + x, (x, *states[:-1])

    class Named(Chain):
        def step(self, x, y, a, *others):
            return a + y * others[0], (x, a, others[0])

    assert (Chain.input_names, Named.input_names) == (("x",), ("x", "y"))
    x = torch.rand(5, 2, 3)
    for neuron, inputs in ((Chain(), (x,)), (Named(), (x, x))):
        assert torch.equal(neuron(*inputs), neuron(*inputs, impl="reference"))
    with pytest.raises(TypeError, match=r"takes \(\*states\), but the states declared are \(a\)"):

        class Wrong(Neuron):
            a = State()

            def step(self, *states):
                return states[0], states


def test_complex_parameters_are_refused():
    neuron, x = Two(torch.tensor(0.5 + 1j)), torch.ones(2, 1, 1)
    for impl in ("numba", "reference"):
        with pytest.raises(TypeError, match=r"'decay' is a torch\.complex64 tensor: expected real"):
            neuron(x, x, impl=impl)
