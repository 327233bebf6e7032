"""Batch norm as the first operation of a neuron's step, so that one kernel computes both."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spikefuse.neurons.definition import Neuron, cached_class, call_step

#: The run-time values of the norm, one per channel; those of the neuron begin with "neuron.".
NORM_VALUES = ("mean", "scale", "shift")
#: Those of the residual's norm, if it has one. Its shift is added to `shift`.
RESIDUAL_VALUES = ("residual_mean", "residual_scale")
#: The values of a norm if the step computes its scale. Names of the residual's norm begin with
#: "residual_".
RUNNING_VALUES = ("mean", "variance", "weight", "shift")
#: The scales of both norms.
SCALES = (NORM_VALUES[1], RESIDUAL_VALUES[1])
#: The values that only the gradients of the inputs read: for each norm, an offset and a slope.
CORRECTION = ("offset", "slope")
RESIDUAL_CORRECTION = ("residual_offset", "residual_slope")


class Kind(NamedTuple):
    """What a block computes besides the norm of its first input and the neuron.

    Attributes:
        has_residual: whether the second input is added to the normalized first one.
        by_batch: whether the norms use the statistics of the batch, through which gradients flow.
        normalizes_residual: whether the residual has a norm of its own.
        returns_sum: whether the last output is what the neuron reads: the normalized first input,
            plus the residual. The neuron reads it in float32; as an output it is rounded to the
            dtype of the inputs.
        has_factor: whether an input after these multiplies the normalized first one.
        only_shifts: whether the norm is no more than its shift, as the bias of a convolution is.
        eps: of each norm, where a step computes their scales; see `functional.eps_of_step`.
    """

    has_residual: bool = False
    by_batch: bool = True
    normalizes_residual: bool = False
    returns_sum: bool = False
    has_factor: bool = False
    only_shifts: bool = False
    eps: tuple[float, ...] = ()


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
    """A neuron whose first input is `(x - mean) * scale + shift`, times a factor if there is one,
    plus a residual if there is one, itself normalized or not; made by `with_batch_norm`."""

    neuron: Neuron
    mean: Tensor
    scale: Tensor
    shift: Tensor
    residual_shift: Tensor
    kind: Kind

    def normalized_step(self, *args: Tensor) -> Any:
        num = 1 + self.kind.has_residual
        (x, *residuals), rest = args[:num], [*args[num:]]
        shift = self.shift
        if len(self.kind.eps) > 1:
            shift = shift + self.residual_shift
        u = self._scaled(x) + shift
        if self.kind.has_factor:
            factor, *rest = rest
            u = u * factor
        for residual in residuals:
            normalized = self.kind.normalizes_residual
            u = u + (self._scaled(residual, "residual_") if normalized else residual)
        split = len(rest) - len(self.states)
        outputs, states = call_step(self.neuron, (u, *rest[:split]), tuple(rest[split:]))
        return (*outputs, u) if self.kind.returns_sum else outputs, states

    def _scaled(self, x: Tensor, prefix: str = "") -> Tensor:
        if self.kind.only_shifts:
            return x
        mean = getattr(self, prefix + "mean")
        if self.kind.eps:
            variance = getattr(self, prefix + "variance") + self.kind.eps[bool(prefix)]
            scale = torch.sqrt(variance).reciprocal() * getattr(self, prefix + "weight")
        else:
            scale = getattr(self, prefix + "scale")
        if self.kind.by_batch:
            offset, slope = getattr(self, prefix + "offset"), getattr(self, prefix + "slope")
            x = _AddStatisticsGradient.apply(x, mean, offset, slope)
        result: Tensor = (x - mean) * scale
        return result


def with_batch_norm(neuron: Neuron, norm: Sequence[Tensor], kind: Kind) -> NormedNeuron:
    """`neuron`, which may be one `with_outputs`, with a batch norm before it.

    Args:
        norm: the values of `value_names`, `[C]` each; zeros for corrections.
    """
    names = ["residual"] * kind.has_residual + ["factor"] * kind.has_factor
    definition = _class(type(neuron), tuple(names))()
    definition.neuron, definition.kind = neuron, kind
    corrections = [torch.zeros_like(norm[0])] * (2 * len(CORRECTION))
    for name, value in zip(value_names(kind), (*norm, *corrections), strict=False):
        setattr(definition, name, value)
    return definition


def value_names(kind: Kind) -> tuple[str, ...]:
    """The run-time values of the norm, or of both norms, in the order in which blocks pass them."""
    if kind.only_shifts:
        return NORM_VALUES[-1:]
    if kind.eps:
        more = tuple(f"residual_{name}" for name in RUNNING_VALUES)
        return RUNNING_VALUES + more * kind.normalizes_residual
    values = NORM_VALUES + RESIDUAL_VALUES * kind.normalizes_residual
    corrections = CORRECTION + RESIDUAL_CORRECTION * kind.normalizes_residual
    return values + corrections * kind.by_batch


@cached_class
def _class(kind: type[Neuron], more: tuple[str, ...]) -> type[NormedNeuron]:
    """`NormedNeuron` with the states and inputs of a neuron, and more inputs after the first."""
    first, *others = kind.input_names
    names = ("self", first, *more, *others, *kind.states)

    def step(self: NormedNeuron, *args: Tensor) -> Any:
        return self.normalized_step(*args)

    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
    setattr(step, "__signature__", inspect.Signature(parameters))  # noqa: B010
    return type(f"Normed{kind.__name__}", (NormedNeuron,), {**kind.states, "step": step})
