"""Windows of max pooling, and the maps they run over."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Pair = tuple[int, int]

# Kernels are unrolled over the positions of a window, and use 32-bit offsets in a map.
MAX_WINDOW, MAX_MAP = 64, 1 << 30


class Window(NamedTuple):
    """Sizes over (rows, columns), as in `torch.nn.MaxPool2d`."""

    kernel: Pair
    stride: Pair
    padding: Pair
    ceil_mode: bool = False

    def is_valid(self) -> bool:
        """Whether PyTorch accepts the window. A valid one never lies in the padding alone."""
        half = all(0 <= 2 * p <= k for p, k in zip(self.padding, self.kernel, strict=True))
        return half and min(*self.kernel, *self.stride) > 0

    def outputs(self, dim: int, size: int) -> int:
        """Return the number of windows along `size` rows (`dim` 0) or columns (1)."""
        kernel, stride, padding = self.kernel[dim], self.stride[dim], self.padding[dim]
        last = size + 2 * padding - kernel  # the last start of a window
        if not self.ceil_mode:
            return last // stride + 1
        # Windows must start inside the input.
        return min(-(-last // stride), (size + padding - 1) // stride) + 1


class Maps(NamedTuple):
    """Pooling from memory `[..., rows, columns, inner]` to `[..., out_rows, out_columns, inner]`.

    `inner` is the number of channels in channels-last memory, else 1.
    """

    window: Window
    rows: int
    columns: int
    out_rows: int
    out_columns: int
    inner: int

    @property
    def memory_format(self) -> torch.memory_format:
        return torch.contiguous_format if self.inner == 1 else torch.channels_last

    def count_in(self, shape: tuple[int, ...]) -> int:
        """Return the number of maps in an input of `shape`."""
        return shape[0] * (shape[1] // self.inner)

    @property
    def is_whole(self) -> bool:
        """Whether all windows lie inside the maps."""
        (height, width), (down, right), padding, _ = self.window
        last_row, last_column = (self.out_rows - 1) * down, (self.out_columns - 1) * right
        fits = last_row + height <= self.rows and last_column + width <= self.columns
        return fits and padding == (0, 0)

    @property
    def has_pairs(self) -> bool:
        """Whether windows are 2 by 2, whole, and side by side in contiguous memory."""
        is_whole = 2 * self.out_rows <= self.rows and 2 * self.out_columns <= self.columns
        return self.inner == 1 and self.window[:3] == ((2, 2), (2, 2), (0, 0)) and is_whole


def maps_of(x: Tensor, window: Window) -> Maps | None:
    """Return the maps of `x`, or None if the kernels do not support it.

    They support float32, bfloat16 and float16 `[N, C, H, W]`, contiguous or channels-last.
    """
    return _maps(tuple(x.shape), x.stride(), window) if x.dtype in DTYPES else None


@lru_cache(maxsize=512)
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
    """Return the number of adjacent values of a pixel, or None for unsupported layouts."""
    like = torch.empty_strided(shape, strides, device="meta")
    if like.is_contiguous():
        return 1
    return shape[1] if like.is_contiguous(memory_format=torch.channels_last) else None
