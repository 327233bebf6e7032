"""Raise an error where gradients that kernels have computed are differentiated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def no_double_backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    raise RuntimeError(
        "double backward through a spikefuse neuron is not supported, nor through an EventLinear, "
        "nor, in a fused network, through an autograd.Function: "
        "what computes the gradient has no derivative of its own; "
        'impl="reference" differentiates the eager loop twice, with nn.Linear for EventLinear'
    )


class _Refused(torch.autograd.Function):
    """The identity of a gradient that was computed from tensors; raises when differentiated."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *tensors: Tensor) -> Tensor:
        return grad.view_as(grad)

    backward = staticmethod(no_double_backward)


def refuse_double_backward(
    grads: Sequence[Tensor | None], *read: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients that a backward pass returns, which with `create_graph` raise an error when
    they are differentiated; `read` are the tensors that they were computed from."""
    if not torch.is_grad_enabled():
        return tuple(grads)
    tensors = [t for t in read if t is not None]
    return tuple([None if g is None else _Refused.apply(g, *tensors) for g in grads])
