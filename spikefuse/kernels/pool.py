"""Max pooling that keeps one byte per output for backward: where in its window the maximum stands.

PyTorch's on a GPU writes 8 bytes per output, with and without gradients, and keeps its input. The
kernels here are a GPU's: on a CPU convolutions take the time, and PyTorch's own does as well.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Pair = tuple[int, int]

# Positions of a window at most, over which kernels are unrolled; and values of a map, whose
# offsets have 32 bits.
MAX_WINDOW, MAX_MAP = 64, 1 << 30


class Window(NamedTuple):
    """Sizes over (rows, columns), as `torch.nn.MaxPool2d` takes them."""

    kernel: Pair
    stride: Pair
    padding: Pair
    ceil_mode: bool = False

    def is_valid(self) -> bool:
        """Whether PyTorch takes it too; then no window lies in the padding alone."""
        half = all(0 <= 2 * p <= k for p, k in zip(self.padding, self.kernel, strict=True))
        return half and min(*self.kernel, *self.stride) > 0

    def outputs(self, dim: int, size: int) -> int:
        """The number of windows along `size` rows (`dim` 0) or columns (1)."""
        kernel, stride, padding = self.kernel[dim], self.stride[dim], self.padding[dim]
        last = size + 2 * padding - kernel  # where the last window may begin
        if not self.ceil_mode:
            return last // stride + 1
        # One that would begin behind the input is none.
        return min(-(-last // stride), (size + padding - 1) // stride) + 1


class Maps(NamedTuple):
    """Memory `[..., rows, columns, inner]`, of which `[..., out_rows, out_columns, inner]` is made;
    inner are the channels if they come last, else 1."""

    window: Window
    rows: int
    columns: int
    out_rows: int
    out_columns: int
    inner: int


def maps_of(x: Tensor, window: Window) -> Maps | None:
    """How the kernels see `x`; None if they don't take it.

    They take float32, bfloat16 and float16 `[N, C, H, W]`, contiguous or with channels last.
    """
    return _maps(tuple(x.shape), x.stride(), window) if x.dtype in DTYPES else None


@lru_cache(maxsize=4096)
def _maps(shape: tuple[int, ...], strides: tuple[int, ...], window: Window) -> Maps | None:
    if len(shape) != 4 or 0 in shape or not window.is_valid():
        return None
    rows, columns = shape[2:]
    outputs = window.outputs(0, rows), window.outputs(1, columns)
    inner = _inner(shape, strides)
    if inner is None or min(outputs) < 1 or window.kernel[0] * window.kernel[1] > MAX_WINDOW:
        return None
    if max(rows * columns, outputs[0] * outputs[1]) * inner > MAX_MAP:
        return None
    return Maps(window, rows, columns, *outputs, inner)


def _inner(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """The values of one pixel that lie together; None in other layouts."""
    like = torch.empty_strided(shape, strides, device="meta")
    if like.is_contiguous():
        return 1
    return shape[1] if like.is_contiguous(memory_format=torch.channels_last) else None


def max_pool2d(x: Tensor, maps: Maps) -> Tensor:
    """Equal to `torch.nn.functional.max_pool2d` bit for bit, in the memory format of `x`.

    Args:
        x: `[N, C, H, W]`.
        maps: `maps_of(x, window)`.

    Its gradient of an input is the sum, in float32 and rounded once, of those of the outputs whose
    maximum it is, in their order: as PyTorch's on a GPU. On a CPU PyTorch rounds each sum in half
    precision; only where windows overlap can that differ.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return _MaxPool.apply(x, maps)
    from spikefuse.kernels import pool_triton

    return pool_triton.forward(x, maps, keep=False)[0]


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, maps: Maps) -> Tensor:
        from spikefuse.kernels import pool_triton

        y, positions = pool_triton.forward(x, maps, keep=True)
        ctx.save_for_backward(positions)
        ctx.maps, ctx.shape = maps, x.shape
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        from spikefuse.kernels import pool_triton

        (positions,) = ctx.saved_tensors
        return pool_triton.backward(grad, positions, ctx.shape, ctx.maps), None
