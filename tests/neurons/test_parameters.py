"""Checked numbers, and modules whose tensors are buffers."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import spikefuse
from spikefuse import LearnableFraction, LearnablePositive
from spikefuse.neurons.parameters import Holder, Learnable, number, positive
from spikefuse.neurons.surrogate import Arctan, Sigmoid, Surrogate
from spikefuse.nn import encode


def test_number() -> None:
    learnable, tensor = LearnableFraction(0.5), torch.tensor([0.0, 0.5, 1.0])
    assert number("p", learnable, 0, 1) is learnable
    assert number("p", tensor, 0, 1) is tensor
    assert [number("p", 0, 0, 1), number("p", 1, 0, 1)] == [0.0, 1.0]


@pytest.mark.parametrize("value", [True, "1", None, nn.Linear(2, 2)], ids=str)
@pytest.mark.parametrize("check", [number, positive, lambda _, value: Sigmoid(value)])
def test_not_a_number(check: Any, value: Any) -> None:
    with pytest.raises(TypeError, match=r"is .*: expected a number, a tensor or a Learnable"):
        check("p", value)


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan")])
def test_not_positive(value: float) -> None:
    with pytest.raises(ValueError, match=r"p is .*: expected a positive finite number"):
        positive("p", value)


def test_positive_accepts_learnable() -> None:
    learnable = Learnable()
    assert positive("p", learnable) is learnable
    assert positive("p", 2) == 2.0


NAN, INF = float("nan"), float("inf")
WRONG: list[tuple[Any, str, list[Any], str]] = [
    (spikefuse.LIF, "decay", [NAN, 1.5, -1], r"expected a number in \[0, 1\]"),
    (spikefuse.LIF, "decay", ["x", None, True], "expected a number, a tensor or a Learnable"),
    (spikefuse.LIF, "threshold", [INF], "expected a finite number"),
    (spikefuse.LIF, "detach_reset", ["yes", 2, None], "expected True or False"),
    (spikefuse.LIF, "decay_input", [0.5], "expected True or False"),
    (spikefuse.LIF, "reset", ["zero", None], "expected one of hard, soft"),
    (spikefuse.LIF, "surrogate", [torch.sigmoid, Sigmoid], r"expected a surrogate like Sigmoid\(4"),
    (spikefuse.TernaryLIF, "threshold", [0.0, -1], "expected a positive finite number"),
    (spikefuse.IntegerLIF, "levels", [0, 2.5, INF], "expected an integer >= 1"),
    (spikefuse.IntegerLIF, "levels", [True, "2"], "expected a number, a tensor or a Learnable"),
    (spikefuse.RefractoryLIF, "refractory", [1.5, -1], "expected an integer >= 0"),
    (spikefuse.RateIF, "negative", ["sometimes"], "expected one of never, undo, always"),
    (Sigmoid, "width", [-1.0], "expected a positive finite number"),
]


@pytest.mark.parametrize(("kind", "name", "values", "message"), WRONG)
def test_arguments_and_assigned_values(
    kind: type[Holder], name: str, values: list[Any], message: str
) -> None:
    holder = kind()
    before = getattr(holder, name)
    for value in values:
        for give in (lambda v: kind(**{name: v}), lambda v: setattr(holder, name, v)):
            with pytest.raises((TypeError, ValueError), match=f"{name} is .*: {message}"):
                give(value)
    assert getattr(holder, name) is before


@pytest.mark.parametrize(
    ("kind", "name", "values"),
    [
        (spikefuse.LIF, "decay", [0.5, 1.6]),
        (spikefuse.TernaryLIF, "threshold", -1.0),
        (spikefuse.QIF, "tau", -2.0),
        (spikefuse.RateIF, "threshold", [1.0, -1.0]),
        (spikefuse.LIF, "threshold", [NAN, 1.0]),
        (spikefuse.IntegerLIF, "levels", [2.0, 2.5]),
    ],
)
def test_tensors_out_of_range(kind: type[Holder], name: str, values: Any) -> None:
    tensor, holder = torch.tensor(values), kind()
    for wrong in (tensor, tensor.half()):
        with pytest.raises(ValueError, match=rf"{name} is (.|\n)*: expected a"):
            kind(**{name: wrong})
        with pytest.raises(ValueError, match=rf"{name} is (.|\n)*: expected a"):
            setattr(holder, name, wrong)
    for unread in (tensor.to("meta"), nn.Parameter(tensor)):  # which may leave its range
        kind(**{name: unread})


def test_frequencies_that_do_not_fit_the_step() -> None:
    neuron = spikefuse.BRF(omega=50.0)
    for name, value, limit in (("omega", 101.0, 100), ("omega", -1.0, 100), ("dt", 0.1, 10)):
        with pytest.raises(ValueError, match=rf"omega is .*: expected a number in \[0, {limit}\]"):
            setattr(neuron, name, value)
    neuron.dt = 0.005
    neuron.omega = 200.0


def test_numbers_in_place_of_fractions() -> None:
    neuron = spikefuse.GatedLIF(alpha=torch.tensor(0.5))
    with pytest.raises(ValueError, match=r"alpha is 1\.5: expected a number in \[0, 1\]"):
        neuron.alpha = 1.5
    neuron.alpha = 1.0


def test_tensors_whose_values_are_not_known() -> None:
    def total(decay: torch.Tensor) -> torch.Tensor:
        neuron = spikefuse.LIF(threshold=9.0)
        neuron.decay = decay
        return neuron(torch.ones(2, 1, 1), return_state=True, impl="reference")[1][0].sum()

    decays = torch.tensor([0.5, 2.0])  # 2 is out of range, v = decay + 1
    assert torch.func.vmap(total)(decays).tolist() == [1.5, 3.0]
    assert torch.func.vmap(torch.func.grad(total))(decays).tolist() == [1.0, 1.0]
    with FakeTensorMode():
        spikefuse.LIF().decay = torch.tensor(2.0)


def test_learned_values_may_leave_their_range() -> None:
    neurons = [spikefuse.LIF(nn.Parameter(torch.tensor(0.5))) for _ in range(2)]
    with torch.no_grad():
        neurons[0].decay.fill_(1.25)
    neurons[1].load_state_dict(neurons[0].state_dict(), assign=True)
    for neuron in (*neurons, copy.deepcopy(neurons[0])):
        _, (v,) = neuron(torch.full((2, 1, 1), 0.25), return_state=True, impl="reference")
        assert v.item() == 1.25 * 0.25 + 0.25
    with pytest.raises(ValueError, match=r"expected a number in \[0, 1\]"):
        copy.deepcopy(neurons[0]).decay = 1.25


def test_checks_in_a_constructor_of_a_user() -> None:
    class Mine(spikefuse.LIF):
        def __init__(self) -> None:
            super().__init__()
            self.decay = nn.Parameter(torch.tensor([0.5, 0.75]))
            self.threshold, self.detach_reset, self.leak = 2, np.bool_(True), 7

    mine = Mine()
    assert (type(mine.threshold), mine.detach_reset, mine.leak) == (float, True, 7)
    mine.leak = torch.tensor([3, 4])
    with pytest.raises(TypeError, match=r"decay is a torch\.int64 tensor"):
        mine.decay = mine.leak


def test_plain_tensors_become_buffers() -> None:
    neuron = spikefuse.LIF(decay=torch.tensor(0.5))
    assert neuron.state_dict()["decay"] == 0.5
    assert neuron.to("meta").decay.device.type == "meta"


@pytest.mark.parametrize("holder", [spikefuse.LIF(), Sigmoid()])
def test_a_number_replaces_a_tensor(holder: Holder) -> None:
    for value in (torch.tensor(0.5), 2.0, torch.tensor(0.25), LearnableFraction(0.5)):
        holder.value = value
        assert holder.value is value
        assert ("value" in holder.state_dict()) == isinstance(value, torch.Tensor)
    with pytest.raises(TypeError, match="cannot assign"):
        holder.value = "text"


@pytest.mark.parametrize("base", [spikefuse.Neuron, Surrogate])
@pytest.mark.parametrize("value", [0.5, torch.tensor(0.5), Sigmoid()], ids=["float", "t", "m"])
def test_the_base_constructor_must_run_first(base: type[Holder], value: Any) -> None:
    def init(self: Any) -> None:
        self.gain = value

    hasty = type("Hasty", (base,), {"__init__": init})
    with pytest.raises(AttributeError, match=r"Hasty\.gain .*: call super\(\)\.__init__\(\) first"):
        hasty()


class Own(spikefuse.Neuron):
    """A user's neuron."""

    v = spikefuse.State()

    def __init__(self, tau: float) -> None:
        super().__init__()
        self.decay, self.steps, self.soft, self._private = 1 - 1 / tau, 3, True, 1.0


class Fixed(spikefuse.LIF):
    """A neuron whose constructor offers nothing."""

    def __init__(self) -> None:
        super().__init__(0.9, surrogate=Arctan())


SHOWN: dict[str, Any] = {
    "LIF(decay=0.333333, threshold=1, v_reset=0, reset='soft', surrogate=Arctan(width=2))": (
        lambda: spikefuse.LIF(1 / 3, reset="soft", surrogate=Arctan(2.0))
    ),
    "LIF(decay=Parameter(0.5), threshold=tensor(shape=[3]), decay_input=True, v_reset=0, "
    "reset='hard', detach_reset=True, surrogate=Sigmoid(width=Parameter(4), cutoff=-0.5))": (
        lambda: spikefuse.LIF(
            nn.Parameter(torch.tensor(0.5)),
            torch.ones(3),
            decay_input=True,
            detach_reset=True,
            surrogate=Sigmoid(nn.Parameter(torch.tensor(4.0)), cutoff=-0.5),
        )
    ),
    "PLIF(decay=LearnableFraction(0.75), threshold=LearnablePositive(shape=[3]), v_reset=0, "
    "reset='hard', surrogate=Sigmoid(width=4))": (
        lambda: spikefuse.PLIF(0.75, LearnablePositive(1.0, channels=3))
    ),
    "IntegerLIF(decay=0.25, threshold=1, levels=4)": spikefuse.IntegerLIF,
    "CLIF(decay=0.5, threshold=1, surrogate=Sigmoid(width=4), reset='soft')": spikefuse.CLIF,
    "LI(decay=Parameter(shape=[]))": (
        lambda: spikefuse.LI(nn.Parameter(torch.tensor(0.5))).to("meta")
    ),
    "Own(decay=0.75, steps=3, soft=True)": lambda: Own(4.0),
    "Fixed(decay=0.9, surrogate=Arctan(width=2))": Fixed,
}


@pytest.mark.parametrize("text", SHOWN)
def test_what_print_shows(text: str) -> None:
    assert repr(SHOWN[text]()) == text
    assert str(nn.Sequential(SHOWN[text]())) == f"Sequential(\n  (0): {text}\n)"


def test_print_follows_changes() -> None:
    neuron = spikefuse.LI()
    neuron.decay = nn.Parameter(torch.tensor(0.25))
    assert repr(neuron) == "LI(decay=Parameter(0.25))"


def test_integers_of_numpy():
    four = np.int64(4)
    x = torch.rand(4, 2, 4)
    for layer in (
        spikefuse.Recurrent(spikefuse.LIF(), four, heads=np.int32(2)),
        spikefuse.Delay(four, four),
        spikefuse.DelayedLinear(four, four, four),
        spikefuse.OverTime(lambda x: x[4:], history=four),
    ):
        assert layer(x).shape == x.shape
    assert encode.direct(x[0], four).shape == (4, 2, 4)
    assert encode.population(x[0], four).shape == (2, 16)
    with pytest.raises(ValueError, match="num_steps is True: expected an integer"):
        encode.direct(x[0], True)
