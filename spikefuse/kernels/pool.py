"""Pooling by kernels that take any memory format.

Max pooling saves one byte per output for backward, the position of the maximum; PyTorch writes 8
bytes per output, with and without gradients, and saves its input. Average pooling saves nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spikefuse.kernels.pool_layout import Maps, Window, maps_of
from spikefuse.kernels.threads import import_module

__all__ = ["Maps", "Window", "avg_pool2d", "maps_of", "max_pool2d"]


def max_pool2d(x: Tensor, maps: Maps, backend: str) -> Tensor:
    """Compute `torch.nn.functional.max_pool2d`, bit for bit, in the memory format of `x`.

    The gradient of an input is summed in float32 in the order of the outputs and rounded once, as
    PyTorch does on a GPU. On a CPU, PyTorch rounds every partial sum in half precision, which
    differs only where windows overlap.

    Args:
        x: `[N, C, H, W]`.
        maps: `maps_of(x, window)`.
        backend: "triton", or "numba" for maps with `has_pairs`.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return _MaxPool.apply(x, maps, backend)
    return _kernels(backend).forward(x, maps, save=False)[0]


def avg_pool2d(x: Tensor, maps: Maps) -> Tensor:
    """Compute `torch.nn.functional.avg_pool2d` on a GPU, in the memory format of `x`.

    Sums are in float32, in the order of the window, and rounded once.

    Args:
        x: `[N, C, H, W]`.
        maps: `maps_of(x, window)`, with `is_whole`.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return _AvgPool.apply(x, maps)
    return _kernels("triton").mean(x, maps)


def _kernels(backend: str) -> Any:
    if backend == "triton":
        return import_module("spikefuse.kernels.pool_triton")
    return import_module("spikefuse.kernels.pool_numba")


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, maps: Maps, backend: str) -> Tensor:
        y, positions = _kernels(backend).forward(x, maps, save=True)
        ctx.save_for_backward(positions)
        ctx.maps, ctx.backend, ctx.shape = maps, backend, x.shape
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (positions,) = ctx.saved_tensors
        return _kernels(ctx.backend).backward(grad, positions, ctx.shape, ctx.maps), None, None


class _AvgPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, maps: Maps) -> Tensor:
        ctx.maps, ctx.shape = maps, x.shape
        return _kernels("triton").mean(x, maps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _kernels("triton").mean_backward(grad, ctx.shape, ctx.maps), None
