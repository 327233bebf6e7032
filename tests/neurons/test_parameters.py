"""Checked numbers, and modules whose tensors are buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import spikefuse
from spikefuse import LearnableFraction, LearnablePositive
from spikefuse.neurons.parameters import Holder, Learnable, number, positive
from spikefuse.neurons.surrogate import Arctan, Sigmoid, Surrogate
from spikefuse.nn import encode


def test_number() -> None:
    learnable, tensor = LearnableFraction(0.5), torch.tensor(7.0)
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
