"""Differentiable products and layers on events."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from spikefuse.events.format import Events
from spikefuse.neurons.definition import Definition

if TYPE_CHECKING:
    from spikefuse.events.layer_numba import FusedLayer

# Rows of a sparse gradient of the weights, or None; gradients of weights, bias and values.
Grads = tuple[Tensor | None, Tensor, Tensor, Tensor | None]


class _Operation(Protocol):
    """A function of the values of events, a weight and a bias."""

    def forward(self, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def saved(self) -> tuple[Tensor, ...]:
        """Return what is saved for backward, so that `explain` and memory budgets count it."""
        ...

    def backward(self, weight: Tensor, grad: Tensor) -> Grads: ...


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        operation: _Operation,
    ) -> Tensor:
        y = operation.forward(weight, bias)
        ctx.save_for_backward(weight, *operation.saved())
        ctx.operation, ctx.has_bias = operation, bias is not None
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight = ctx.saved_tensors[0]  # raises an error if it was modified in place
        rows, grad_weight, grad_bias, grad_values = ctx.operation.backward(weight, grad)
        if rows is not None:
            # PyTorch 2.11 and 2.12 warn even if the argument check_invariants= is given.
            with torch.sparse.check_sparse_tensor_invariants(False):
                grad_weight = torch.sparse_coo_tensor(
                    rows[None], grad_weight, weight.shape, is_coalesced=True
                )
        return grad_values, grad_weight, grad_bias if ctx.has_bias else None, None


@dataclass
class _Product:
    events: Events
    sparse: bool
    impl: str

    @property
    def _kernels(self) -> Any:
        if self.impl == "triton":
            from spikefuse.events import products_triton

            return products_triton
        from spikefuse.events import products_numba

        return products_numba

    def forward(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = self._kernels.currents(self.events, weight, bias)
        return y

    def saved(self) -> tuple[Tensor, ...]:
        return self.events.lists

    def backward(self, weight: Tensor, grad: Tensor) -> Grads:
        found: Grads = self._kernels.gradients(self.events, grad, weight, self.sparse)
        return found


def product(events: Events, weight: Tensor, bias: Tensor | None, sparse: bool, impl: str) -> Tensor:
    """Return `[R, O]`: the bias plus the rows of `weight [I, O]` of the inputs that fired.

    Args:
        impl: "numba" or "triton".
        sparse: the gradient of the weight is a sparse tensor with the rows of inputs that fired.
    """
    y: Tensor = _Apply.apply(events.values, weight, bias, _Product(events, sparse, impl))
    return y


def can_fuse(neuron: Definition, weight: Tensor) -> bool:
    """Return whether `layer` supports a neuron: on a CPU, one input, and only floats as values."""
    values = neuron.values().values()
    return (
        weight.is_cpu
        and len(type(neuron).input_names) == 1
        and all(isinstance(value, float) for value in values)
    )


@dataclass
class _Layer:
    fused: FusedLayer
    outputs: Events
    sparse: bool

    def forward(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.outputs.is_fired()

    def saved(self) -> tuple[Tensor, ...]:
        currents = torch.from_numpy(self.fused.currents)
        return *self.fused.events.lists, *self.outputs.lists, currents

    def backward(self, weight: Tensor, grad: Tensor) -> Grads:
        return self.fused.backward(self.outputs, grad, self.sparse)


def layer(
    events: Events, neuron: Definition, weight: Tensor, bias: Tensor | None, sparse: bool
) -> Events:
    """Return the events of neurons that receive `product`, computed in one kernel on a CPU.

    Args:
        neuron: made by `with_candidates`; see `can_fuse`.
        sparse: as in `product`.
    """
    from spikefuse.events.layer_numba import FusedLayer

    fused = FusedLayer(events, neuron, weight.detach(), None if bias is None else bias.detach())
    outputs = fused.forward()
    inputs = events.values, weight, bias
    if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in inputs):
        return outputs
    return replace(outputs, values=_Apply.apply(*inputs, _Layer(fused, outputs, sparse)))


def list_marks(marks: Tensor) -> Events:
    """Return the events of marks `[T, B, W]`, differentiable with respect to the marks."""
    events = Events.from_marks(marks.detach())
    if not marks.requires_grad:
        return events
    return replace(events, values=_ListMarks.apply(marks, events))


class _ListMarks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, marks: Tensor, events: Events) -> Tensor:
        ctx.save_for_backward(*events.lists)
        ctx.events = events
        return events.is_fired().to(marks.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return replace(ctx.events, values=grad).to_dense(grad.dtype), None
