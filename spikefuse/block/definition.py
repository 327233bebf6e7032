"""Batch norm as the first operation of a neuron's step, so that one kernel does both."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from spikefuse.neurons.definition import Definition

#: The run-time values that the norm adds to those of the neuron, which begin with "neuron.".
VALUES = ("mean", "scale", "shift")
#: Those that only the gradient of the input reads.
REVISION = ("offset", "slope")


class _Revise(torch.autograd.Function):
    """`x`, whose gradient `g` becomes `g + offset + slope * (x - mean)`: what flows through the
    statistics of the batch is added, see `spikefuse.kernels.norm.gradient_sums`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *values: Tensor) -> Tensor:
        ctx.save_for_backward(x, *values)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, offset, slope = ctx.saved_tensors
        return gradient + offset + slope * (x - mean), None, None, None


class Normed(Definition):
    """A neuron whose first input is normalised: `(x - mean) * scale + shift`, one value of each per
    channel, plus a residual where there is one. `behind_norm` makes one."""

    neuron: Definition
    mean: Tensor
    scale: Tensor
    shift: Tensor
    #: Whether the second input is a residual.
    adds: bool
    #: Whether the gradient of the first input includes what flows through the statistics.
    revises: bool

    def normalised(self, *args: Tensor) -> Any:
        x, *rest = args
        if self.revises:
            x = _Revise.apply(x, self.mean, self.offset, self.slope)
        u = (x - self.mean) * self.scale + self.shift
        if self.adds:
            u, rest = u + rest[0], rest[1:]
        return self.neuron.step(u, *rest)


def behind_norm(
    neuron: Definition,
    mean: Tensor,
    scale: Tensor,
    shift: Tensor,
    adds: bool = False,
    revises: bool = False,
) -> Normed:
    """`neuron` behind a norm; all values of the norm are `[C]`."""
    kind: Any = type(neuron)
    definition = _class(kind, adds)()
    definition.neuron, definition.adds, definition.revises = neuron, adds, revises
    for name, value in zip(VALUES, (mean, scale, shift), strict=True):
        setattr(definition, name, value)
    if revises:
        for name in REVISION:
            setattr(definition, name, torch.zeros_like(mean))
    return definition


@cache
def _class(kind: type[Definition], adds: bool) -> type[Normed]:
    """`Normed` with the states and the inputs of a neuron."""
    first, *others = kind.input_names
    names = ("self", first, *(["residual"] if adds else []), *others, *kind.states)

    def step(self: Normed, *args: Tensor) -> Any:
        return self.normalised(*args)

    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
    setattr(step, "__signature__", inspect.Signature(parameters))  # noqa: B010
    return type(f"Normed{kind.__name__}", (Normed,), {**kind.states, "step": step})
