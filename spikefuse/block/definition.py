"""Batch norm as the first operation of a neuron's step, so that one kernel computes both."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from spikefuse.neurons.definition import Definition

#: The run-time values of the norm, one per channel; those of the neuron begin with "neuron.".
NORM_VALUES = ("mean", "scale", "shift")
#: The values that only the gradient of the input reads.
CORRECTION = ("offset", "slope")


class _AddStatisticsGradient(torch.autograd.Function):
    """The identity of `x`, whose gradient g becomes `g + offset + slope * (x - mean)`: what flows
    through the statistics of the batch, see `spikefuse.kernels.norm.gradient_sums`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *values: Tensor) -> Tensor:
        ctx.save_for_backward(x, *values)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, offset, slope = ctx.saved_tensors
        return gradient + offset + slope * (x - mean), None, None, None


class NormedNeuron(Definition):
    """A neuron whose first input is `(x - mean) * scale + shift`, plus a residual if there is one;
    made by `with_batch_norm`."""

    neuron: Definition
    mean: Tensor
    scale: Tensor
    shift: Tensor
    #: Whether the second input is a residual.
    has_residual: bool
    #: Whether the gradient of the first input includes what flows through the statistics.
    by_batch: bool

    def normalized_step(self, *args: Tensor) -> Any:
        x, *rest = args
        if self.by_batch:
            x = _AddStatisticsGradient.apply(x, self.mean, self.offset, self.slope)
        u = (x - self.mean) * self.scale + self.shift
        if self.has_residual:
            u, rest = u + rest[0], rest[1:]
        return self.neuron.step(u, *rest)


def with_batch_norm(
    neuron: Definition, norm: tuple[Tensor, Tensor, Tensor], has_residual: bool, by_batch: bool
) -> NormedNeuron:
    """`neuron` behind a batch norm.

    Args:
        norm: mean, scale and shift, `[C]` each.
        by_batch: whether mean and scale are statistics of the batch.
    """
    kind: Any = type(neuron)
    definition = _class(kind, has_residual)()
    definition.neuron = neuron
    definition.has_residual, definition.by_batch = has_residual, by_batch
    for name, value in zip(NORM_VALUES, norm, strict=True):
        setattr(definition, name, value)
    if by_batch:
        for name in CORRECTION:
            setattr(definition, name, torch.zeros_like(norm[0]))
    return definition


@cache
def _class(kind: type[Definition], has_residual: bool) -> type[NormedNeuron]:
    """`NormedNeuron` with the states and the inputs of a neuron."""
    first, *others = kind.input_names
    names = ("self", first, *(["residual"] if has_residual else []), *others, *kind.states)

    def step(self: NormedNeuron, *args: Tensor) -> Any:
        return self.normalized_step(*args)

    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
    setattr(step, "__signature__", inspect.Signature(parameters))  # noqa: B010
    return type(f"Normed{kind.__name__}", (NormedNeuron,), {**kind.states, "step": step})
