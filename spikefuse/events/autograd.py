"""Differentiable products and layers on events.

Weights are those of `EventLinear`, `[O, I]`; kernels take the transpose, which is contiguous.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spikefuse.events.format import Events
from spikefuse.kernels.threads import import_module
from spikefuse.neurons.definition import Neuron
from spikefuse.scan.checks import refuse_transforms
from spikefuse.scan.double_backward import refuse_double_backward

if TYPE_CHECKING:
    from spikefuse.events.layer_numba import FusedLayer


def kernels_of(impl: str) -> Any:
    """Return the module with the products of an implementation, "numba" or "triton"."""
    if impl == "triton":
        return import_module("spikefuse.events.products_triton")
    return import_module("spikefuse.events.products_numba")


def product(events: Events, weight: Tensor, bias: Tensor | None, kernels: Any) -> Tensor:
    """Return `[R, O]`: the bias plus the weights of the inputs that fired; see `kernels_of`."""
    y: Tensor = _Product.apply(events.values, weight, bias, events, kernels)
    return y


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        events: Events,
        kernels: Any,
    ) -> Tensor:
        ctx.save_for_backward(weight, *events.lists)
        ctx.events, ctx.kernels, ctx.has_bias = events, kernels, bias is not None
        y: Tensor = kernels.currents(events, weight.t(), bias)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_transforms([grad])
        weight = ctx.saved_tensors[0]  # raises an error if it was modified in place
        with torch.no_grad():
            found, bias, values = ctx.kernels.gradients(ctx.events, grad, weight.t())
        gradients = values, found.t(), bias if ctx.has_bias else None, None, None
        return refuse_double_backward(gradients, grad, weight, ctx.events.values)


def can_fuse(neuron: Neuron, weight: Tensor) -> bool:
    """Return whether `layer` supports a neuron: on a CPU, one input, and only floats as values."""
    values = neuron.description().values(neuron).values()
    return (
        weight.is_cpu
        and len(type(neuron).input_names) == 1
        and all(isinstance(value, float) for value in values)
    )


def layer(events: Events, neuron: Neuron, weight: Tensor, bias: Tensor | None) -> Events:
    """Return the events of neurons that receive `product`, computed in one kernel on a CPU.

    Args:
        neuron: made by `with_candidates`; see `can_fuse`.
    """
    matrix = weight.detach().t()
    layers = import_module("spikefuse.events.layer_numba")
    fused = layers.FusedLayer(events, neuron, matrix, None if bias is None else bias.detach())
    outputs = fused.forward()
    inputs = events.values, weight, bias
    if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in inputs):
        return outputs
    return outputs.with_values(_EventLayer.apply(*inputs, fused, outputs))


class _EventLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        fused: FusedLayer,
        outputs: Events,
    ) -> Tensor:
        # All that is saved goes through autograd, so that `explain` and memory budgets count it.
        currents = torch.from_numpy(fused.currents)
        ctx.save_for_backward(weight, bias, *fused.events.lists, *outputs.lists, currents)
        ctx.fused, ctx.outputs = fused, outputs
        return outputs.is_fired()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_transforms([grad])
        # Raises an error if weight or bias were modified in place: currents may be recomputed.
        weight, bias, *_ = ctx.saved_tensors
        with torch.no_grad():
            found, by_bias, values = ctx.fused.backward(ctx.outputs, grad)
        gradients = values, found.t(), None if bias is None else by_bias, None, None
        return refuse_double_backward(gradients, grad, weight, bias, ctx.fused.events.values)


def list_marks(marks: Tensor) -> Events:
    """Return the events of marks `[T, B, W]`, differentiable with respect to the marks."""
    events = Events.from_marks(marks.detach())
    if not marks.requires_grad:
        return events
    return events.with_values(_ListMarks.apply(marks, events))


class _ListMarks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, marks: Tensor, events: Events) -> Tensor:
        ctx.save_for_backward(*events.lists)
        ctx.events = events
        return events.is_fired().to(marks.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        refuse_transforms([grad])
        return ctx.events.with_values(grad).to_dense(grad.dtype), None
