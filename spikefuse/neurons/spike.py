"""The autograd function of a spike with a surrogate gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from spikefuse._torch import is_traced


class Spike(torch.autograd.Function):
    """`surrogate.spike(u)`; `learned` passes the gradient of the spike on to the parameters."""

    @staticmethod
    def forward(u: Tensor, surrogate: Any, learned: Tensor | None) -> Tensor:
        return surrogate.spike(u).to(u.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.surrogate = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None]:
        (u,) = ctx.saved_tensors
        surrogate = ctx.surrogate
        if surrogate.cutoff is not None:
            grad = grad.masked_fill(u < surrogate.cutoff, 0.0)
        return grad * surrogate.derivative(u), None, grad if ctx.needs_input_grad[2] else None


class TransformedSpike(Spike):
    """With rules for torch.func and forward-mode differentiation, which torch.compile refuses."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        Spike.setup_context(ctx, inputs, output)
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None, learned: Tensor | None) -> Tensor:
        (u,), surrogate = ctx.saved_tensors, ctx.surrogate
        y = tangent * surrogate.derivative(u) + (0 if learned is None else learned)
        return y if surrogate.cutoff is None else y.masked_fill(u < surrogate.cutoff, 0.0)


def has_tangent(x: Tensor) -> bool:
    """Whether a tensor is differentiated in forward mode."""
    return not is_traced() and unpack_dual(x).tangent is not None
