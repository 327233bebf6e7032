"""Products and layers on events as differentiable operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spikefuse.events.format import Events
from spikefuse.neurons.definition import Definition

# Gradients of (values, weight, bias), and None for each argument that has none.
Grads = tuple[Tensor | None, ...]


def _kernels(impl: str) -> Any:
    """The module of a backend's products."""
    if impl == "triton":
        from spikefuse.events import products_triton as event_triton

        return event_triton
    from spikefuse.events import products_numba as event_numba

    return event_numba


def _lists(events: Events) -> tuple[Tensor, ...]:
    """What is saved for backward besides, so that `spikefuse.explain` and budgets count it."""
    return events.offsets, events.fired, events.indices


def product(events: Events, weight: Tensor, bias: Tensor | None, sparse: bool, impl: str) -> Tensor:
    """`[R, O]`: the bias and the sum of the rows of `weight [I, O]` of the inputs that fired.

    Args:
        impl: "numba" or "triton".
        sparse: the gradient of the weight is a sparse tensor of the rows of inputs that fired.
    """
    return _Product.apply(events.values, weight, bias, events, sparse, impl)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        events: Events,
        sparse: bool,
        impl: str,
    ) -> Tensor:
        ctx.save_for_backward(weight, *_lists(events))
        ctx.events, ctx.sparse, ctx.impl = events, sparse, impl
        ctx.has_bias = bias is not None
        return _kernels(impl).currents(events, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Grads:
        weight = ctx.saved_tensors[0]
        found = _kernels(ctx.impl).gradients(ctx.events, grad, weight, ctx.sparse)
        return *_grads(ctx, weight, *found), None, None, None


def can_fuse(neuron: Definition, weight: Tensor) -> bool:
    """Whether `layer` takes these: see `event_layer.can_fuse`."""
    from spikefuse.events import layer_numba as event_layer

    return event_layer.can_fuse(neuron, weight)


def layer(
    events: Events, neuron: Definition, weight: Tensor, bias: Tensor | None, sparse: bool
) -> Events:
    """The events of neurons that receive `product`, fused on a CPU; see `event_layer`."""
    from spikefuse.events.layer_numba import Layer

    fused = Layer(events, neuron, weight.detach(), None if bias is None else bias.detach())
    outputs = fused.forward()
    inputs = events.values, weight, bias
    if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in inputs):
        return outputs
    return replace(outputs, values=_Layer.apply(*inputs, fused, outputs, sparse))


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        fused: Any,
        outputs: Events,
        sparse: bool,
    ) -> Tensor:
        kept = torch.from_numpy(fused.kept)
        ctx.save_for_backward(weight, *_lists(fused.events), *_lists(outputs), kept)
        ctx.fused, ctx.outputs, ctx.sparse, ctx.has_bias = fused, outputs, sparse, bias is not None
        return outputs.is_fired()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Grads:
        weight = ctx.saved_tensors[0]  # which complains where it has been changed
        found = ctx.fused.backward(ctx.outputs, grad, ctx.sparse)
        return *_grads(ctx, weight, *found), None, None, None


def _grads(
    ctx: Any,
    weight: Tensor,
    rows: Tensor | None,
    grad_weight: Tensor,
    grad_bias: Tensor,
    grad_values: Tensor | None,
) -> Grads:
    if rows is not None:
        # To the argument check_invariants=, PyTorch 2.11 and 2.12 warn all the same.
        with torch.sparse.check_sparse_tensor_invariants(False):
            grad_weight = torch.sparse_coo_tensor(
                rows[None], grad_weight, weight.shape, is_coalesced=True
            )
    return grad_values, grad_weight, grad_bias if ctx.has_bias else None


def listed(marks: Tensor) -> Events:
    """The events of marks `[T, B, W]`, which a neuron with candidates gives, with its gradients."""
    events = Events.from_marks(marks.detach())
    if not marks.requires_grad:
        return events
    return replace(events, values=_Listed.apply(marks, events))


class _Listed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, marks: Tensor, events: Events) -> Tensor:
        ctx.save_for_backward(*_lists(events))
        ctx.events = events
        return events.is_fired().to(marks.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return replace(ctx.events, values=grad).to_dense(grad.dtype), None
