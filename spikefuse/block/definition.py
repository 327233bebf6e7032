"""Batch norm as the first operation of a neuron's step, so that one kernel computes both."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from spikefuse.neurons.definition import Neuron

#: The run-time values of the norm, one per channel; those of the neuron begin with "neuron.".
NORM_VALUES = ("mean", "scale", "shift")
#: Those of the residual's norm, if it has one. Its shift is added to `shift`.
RESIDUAL_VALUES = ("residual_mean", "residual_scale")
#: The scales of both norms.
SCALES = (NORM_VALUES[1], RESIDUAL_VALUES[1])
#: The values that only the gradients of the inputs read: for each norm, an offset and a slope.
CORRECTION = ("offset", "slope")
RESIDUAL_CORRECTION = ("residual_offset", "residual_slope")


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


class NormedNeuron(Neuron):
    """A neuron whose first input is `(x - mean) * scale + shift`, plus a residual if there is one,
    itself normalized or not; made by `with_batch_norm`."""

    neuron: Neuron
    mean: Tensor
    scale: Tensor
    shift: Tensor
    #: Whether the second input is a residual, and whether it is normalized, too.
    has_residual: bool
    normalizes_residual: bool
    #: Whether the gradients of the inputs include what flows through the statistics.
    by_batch: bool
    #: Whether the last output is the sum that the neuron reads.
    returns_sum: bool = False

    def normalized_step(self, *args: Tensor) -> Any:
        x, *rest = args
        u = self._scaled(x) + self.shift
        if self.has_residual:
            residual, *rest = rest
            u = u + (self._scaled(residual, "residual_") if self.normalizes_residual else residual)
        result = self.neuron.step(u, *rest)
        if not self.returns_sum:
            return result
        outputs, states = result
        return (*(outputs if isinstance(outputs, tuple) else (outputs,)), u), states

    def _scaled(self, x: Tensor, prefix: str = "") -> Tensor:
        mean, scale = getattr(self, prefix + "mean"), getattr(self, prefix + "scale")
        if self.by_batch:
            offset, slope = getattr(self, prefix + "offset"), getattr(self, prefix + "slope")
            x = _AddStatisticsGradient.apply(x, mean, offset, slope)
        result: Tensor = (x - mean) * scale
        return result


def with_batch_norm(
    neuron: Neuron,
    norm: Sequence[Tensor],
    has_residual: bool,
    by_batch: bool,
    returns_sum: bool = False,
) -> NormedNeuron:
    """`neuron` with a batch norm before it.

    Args:
        norm: the `NORM_VALUES`, `[C]` each, and the `RESIDUAL_VALUES` to normalize the residual.
        by_batch: whether mean and scale are statistics of the batch.
    """
    kind: Any = type(neuron)
    definition = _class(kind, has_residual)()
    definition.neuron = neuron
    definition.has_residual, definition.by_batch = has_residual, by_batch
    definition.returns_sum = returns_sum
    definition.normalizes_residual = len(norm) > len(NORM_VALUES)
    corrections = [torch.zeros_like(norm[0])] * (2 * len(CORRECTION))
    names = value_names(definition.normalizes_residual, by_batch)
    for name, value in zip(names, (*norm, *corrections), strict=False):
        setattr(definition, name, value)
    return definition


def value_names(normalizes_residual: bool, by_batch: bool) -> tuple[str, ...]:
    """The run-time values of the norm, or of both norms, in the order in which blocks pass them."""
    values = NORM_VALUES + RESIDUAL_VALUES * normalizes_residual
    return values + (CORRECTION + RESIDUAL_CORRECTION * normalizes_residual) * by_batch


@cache
def _class(kind: type[Neuron], has_residual: bool) -> type[NormedNeuron]:
    """`NormedNeuron` with the states and the inputs of a neuron."""
    first, *others = kind.input_names
    names = ("self", first, *(["residual"] if has_residual else []), *others, *kind.states)

    def step(self: NormedNeuron, *args: Tensor) -> Any:
        return self.normalized_step(*args)

    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
    setattr(step, "__signature__", inspect.Signature(parameters))  # noqa: B010
    return type(f"Normed{kind.__name__}", (NormedNeuron,), {**kind.states, "step": step})
