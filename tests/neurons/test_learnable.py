"""Learnable parameters: initial values, ranges, gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import spikefuse as sf
from spikefuse import Learnable, LearnableFraction, LearnablePositive, LearnableTimeConstant
from spikefuse.testing import make_input

KINDS = [LearnableFraction, LearnablePositive, LearnableTimeConstant]


def test_without_forward() -> None:
    with pytest.raises(NotImplementedError, match=r"Learnable does not define forward\(self\)"):
        Learnable()()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (LearnableFraction(0.9), 0.9),
        (LearnablePositive(12.0), 12.0),
        (LearnableTimeConstant(2.0), math.exp(-0.5)),
        (LearnableTimeConstant(5.0), sf.decay_from_tau(5.0, exact=True)),
    ],
)
def test_initial_values(value: Learnable, expected: float) -> None:
    assert value().shape == ()
    assert value().item() == pytest.approx(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_one_value_per_channel(kind: Any) -> None:
    values = kind(0.2, channels=3)()
    assert values.shape == (3,)
    assert values.tolist() == pytest.approx([kind(0.2)().item()] * 3)


@pytest.mark.parametrize("step", [-20.0, 20.0])
@pytest.mark.parametrize(("kind", "high"), [*zip(KINDS, (1.0, math.inf, 1.0), strict=True)])
def test_stays_in_range(kind: Any, high: float, step: float) -> None:
    value = kind(0.5).double()
    with torch.no_grad():
        for parameter in value.parameters():
            parameter += step
    assert 0 <= value().item() <= high
    assert (value() * 0).item() == 0


def test_the_gradient_of_a_time_constant() -> None:
    value = LearnableTimeConstant(4.0).double()
    value().backward()
    # d exp(-1/tau) / d log tau = exp(-1/tau) / tau
    assert value.log_tau.grad.item() == pytest.approx(math.exp(-0.25) / 4)


@pytest.mark.parametrize("initial", [0.0, -1.0, math.inf, math.nan])
def test_bad_values(initial: float) -> None:
    with pytest.raises(ValueError, match=r"initial is .*: expected a positive finite number"):
        LearnablePositive(initial)
    with pytest.raises(ValueError, match=r"tau is .*: expected a positive finite number"):
        LearnableTimeConstant(initial)
    with pytest.raises(ValueError, match=r"initial is .*: expected a number strictly between"):
        LearnableFraction(initial)


@pytest.mark.parametrize("channels", [None, 3])
def test_a_neuron_learns_its_parameters(channels: int | None) -> None:
    neuron = sf.LIF(
        LearnableTimeConstant(3.0, channels),
        LearnablePositive(0.5, channels),
        surrogate=sf.surrogate.Arctan(LearnablePositive(2.0, channels)),
    )
    neuron(make_input((6, 2, 3, 8))).sum().backward()
    found = dict(neuron.named_parameters())
    assert set(found) == {"decay.log_tau", "threshold.log_value", "surrogate.width.log_value"}
    for name, parameter in found.items():
        assert parameter.grad is not None, name
        assert parameter.grad.shape == parameter.shape
        assert (parameter.grad != 0).all(), name


def test_several_values_before_training() -> None:
    for value in ([0.5, 0.9], torch.tensor([0.5, 0.9]), nn.Parameter(torch.tensor([0.5, 0.9]))):
        for kind in (LearnableFraction, LearnablePositive):
            learnable = kind(value)
            torch.testing.assert_close(learnable(), torch.tensor([0.5, 0.9]))
            assert len(list(learnable.parameters())) == 1
    plif = sf.PLIF(torch.tensor([0.5, 0.9]), channels=2)
    torch.testing.assert_close(plif.values()["decay"], torch.tensor([0.5, 0.9]))
    decay = LearnableTimeConstant([5.0, 20.0])()
    torch.testing.assert_close(decay, torch.exp(-1 / torch.tensor([5.0, 20.0])))


@pytest.mark.parametrize(
    ("initial", "channels", "message"),
    [
        ([0.5, 1.0], None, "strictly between 0 and 1"),
        ([0.5, math.nan], None, "strictly between 0 and 1"),
        ([0.5, 0.75], 3, r"initial has shape \[2\]: expected \[3\]"),
    ],
)
def test_wrong_values_before_training(initial: Any, channels: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LearnableFraction(initial, channels)
    with pytest.raises(TypeError, match="initial is 'a': expected a number, or several"):
        LearnableFraction("a")  # type: ignore[arg-type]
