"""Checks that the products of every backend have to pass."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import torch

from spikefuse.events.format import Events
from spikefuse.events.lists import FIRED, NEAR


def check(kernels: ModuleType, inputs: int, outputs: int, rate: float = 0.1) -> None:
    """Compare `currents` and `gradients` with dense products in float64."""
    torch.manual_seed(0)
    drawn = torch.rand(5, 3, inputs)
    marks = (drawn < rate) * FIRED + ((drawn > rate) & (drawn < 2 * rate)) * NEAR
    marks[1, 2] = 0
    events = Events.from_marks(marks)
    events = replace(events, values=events.is_fired())
    spikes = events.to_dense().view(15, inputs).double()
    weight, bias = torch.randn(inputs, outputs), torch.randn(outputs)
    grad = torch.randn(15, outputs)
    close(kernels.currents(events, weight, bias), spikes @ weight.double() + bias)
    close(kernels.currents(events, weight, None), spikes @ weight.double())
    wanted = grad.double() @ weight.double().T
    found, biases, values = kernels.gradients(events, grad, weight)
    close(found, spikes.T @ grad.double())
    close(biases, grad.double().sum(0))
    close(values, wanted[events.rows(), events.indices.long()])
    assert kernels.gradients(replace(events, values=None), grad, weight)[2] is None


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare values that are sums of few terms of the order of 1."""
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-4)
