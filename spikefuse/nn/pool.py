"""Max pooling that keeps one byte per output for backward."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from spikefuse.kernels import pool
from spikefuse.kernels.triton_runtime import interpreted
from spikefuse.nn.neuron import calls
from spikefuse.scan.op import check, is_plain

Size = int | tuple[int, ...] | list[int]


class MaxPool2d(nn.MaxPool2d):
    """`torch.nn.MaxPool2d`, equal to it bit for bit, that keeps one byte per output for backward
    on a GPU, where PyTorch's keeps its input and 8 bytes per output.

    See `max_pool2d` for where that is.
    """

    def forward(self, input: Tensor) -> Any:
        if self.return_indices:
            return super().forward(input)
        sizes = self.kernel_size, self.stride, self.padding, self.dilation
        return max_pool2d(input, *sizes, self.ceil_mode)


def max_pool2d(
    input: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """`torch.nn.functional.max_pool2d`, with arguments and results the same but for indices.

    A kernel of ours computes float32, bfloat16 and float16 on a GPU (or inside
    `Temporal(...)(x, impl="triton")`), `[N, C, H, W]` contiguous or with channels last, in windows
    of up to 64 positions without dilation. PyTorch's own computes all else, also under
    torch.compile, which generates a kernel that keeps as little, and under transforms of functions.
    Outputs are binary where the input is, and then layers that keep them keep bits: see
    `spikefuse.memory`.

    Raises:
        ImportError: the kernel is to compute this, but Triton is not installed.
    """
    # With a dilation a window may lie in the padding alone, whose maximum is no value of the input.
    if torch.compiler.is_compiling() or _pair(dilation) != (1, 1):
        return F.max_pool2d(input, kernel_size, stride, padding, dilation, ceil_mode)
    window = _window(kernel_size, stride, padding, ceil_mode) if _by_kernel(input) else None
    maps = None if window is None else pool.maps_of(input, window)
    if maps is None:
        y = F.max_pool2d(input, kernel_size, stride, padding, 1, ceil_mode)
    else:
        check("triton", input)
        y = pool.max_pool2d(input, maps)
    if calls.sequence is not None and calls.sequence.spikes is not None:
        calls.sequence.spikes.mark_selected(y, input)
    return y


def _by_kernel(x: Tensor) -> bool:
    """Whether this is a call for kernels, on tensors that they can read."""
    if not is_plain((x,)) or forward_ad._current_level >= 0:
        return False
    impl = "auto" if calls.sequence is None else calls.sequence.impl
    return impl in ("auto", "triton") if x.is_cuda else impl == "triton" and interpreted()


def _window(
    kernel_size: Size, stride: Size | None, padding: Size, ceil_mode: bool
) -> pool.Window | None:
    kernel, pad = _pair(kernel_size), _pair(padding)
    steps = kernel if stride is None else _pair(stride)
    if kernel is None or steps is None or pad is None:
        return None
    return pool.Window(kernel, steps, pad, bool(ceil_mode))


def _pair(size: Size) -> tuple[int, int] | None:
    """(rows, columns) as Python's integers; None for what PyTorch refuses, to which the message
    is left."""
    sizes = size if isinstance(size, tuple | list) else (size,)
    # PyTorch takes integers of any kind, but no bool.
    if len(sizes) not in (1, 2) or any(isinstance(s, bool) for s in sizes):
        return None
    try:
        return operator.index(sizes[0]), operator.index(sizes[-1])
    except TypeError:
        return None
