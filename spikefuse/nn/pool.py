"""Max pooling that saves one byte per output for backward."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spikefuse.kernels import pool
from spikefuse.kernels.triton_runtime import interpreted
from spikefuse.neurons.checks import is_plain
from spikefuse.nn.call import active
from spikefuse.scan.checks import check_backend

# Values of an input from which a kernel on a CPU is faster than PyTorch's.
MIN_VALUES = 1 << 16

Size = int | tuple[int, ...] | list[int]


class MaxPool2d(nn.MaxPool2d):
    """`torch.nn.MaxPool2d` that saves one byte per output for backward.

    PyTorch saves its input and 8 bytes per output. Arguments, shapes and results are those of
    `torch.nn.MaxPool2d`, bit for bit; the kernel sums gradients in float32 in a fixed order. See
    `max_pool2d` for the inputs that it takes.

    Args:
        kernel_size (int | tuple[int, int]): rows and columns of a window.
        stride (int | tuple[int, int] | None): distance between windows, by default `kernel_size`.
        padding (int | tuple[int, int]): rows and columns of minus infinity at each side; by
            default 0.
        dilation (int | tuple[int, int]): distance between the values of a window, by default 1.
        return_indices (bool): also return the position of each maximum; by default False.
        ceil_mode (bool): whether windows may begin inside the input and end outside; by
            default False.
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
    """Compute `torch.nn.functional.max_pool2d`, with the same arguments, but without indices.

    Kernels take float32, bfloat16 and float16 `[N, C, H, W]`: on a GPU contiguous or channels-last,
    with windows of up to 64 positions without dilation; on a CPU contiguous, with windows of 2 by 2
    side by side, from 65,536 values. PyTorch computes everything else, including calls under
    function transforms and torch.compile, whose generated kernel saves as little.

    The maxima of spikes are spikes, which layers save as bits; see `spikefuse.memory`.

    Raises:
        ImportError: the kernel is needed, but Triton is not installed.
    """
    # With dilation, a window may lie in the padding alone, whose maximum is not an input value.
    if _pair(dilation) != (1, 1) or not is_plain((input,)):
        return F.max_pool2d(input, kernel_size, stride, padding, dilation, ceil_mode)
    backend = _backend(input)
    window = _window(kernel_size, stride, padding, ceil_mode) if backend else None
    maps = None if window is None else pool.maps_of(input, window)
    if maps is None or (backend == "numba" and not maps.has_pairs):
        y = F.max_pool2d(input, kernel_size, stride, padding, 1, ceil_mode)
    else:
        check_backend(backend, input)
        y = pool.max_pool2d(input, maps, backend)
        if active.observer is not None:
            active.observer.pool(input, y)
    if active.spikes is not None:
        active.spikes.register_selection(y, input)
    return y


def avg_pool2d(
    input: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """Compute `torch.nn.functional.avg_pool2d`, with the same arguments.

    On a GPU, a kernel computes windows that lie inside the input; PyTorch's kernels for
    channels-last memory take several times as long. PyTorch computes everything else.
    """
    if divisor_override is None and _backend(input) == "triton":
        window = _window(kernel_size, stride or kernel_size, padding, ceil_mode)
        maps = None if window is None else pool.maps_of(input, window)
        if maps is not None and maps.is_whole:
            return pool.avg_pool2d(input, maps)
    return F.avg_pool2d(
        input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    )


def _backend(x: Tensor) -> str:
    """The backend whose kernel may compute this call; empty for PyTorch."""
    if torch.jit.is_tracing() or not is_plain((x,)):  # type: ignore[attr-defined]
        return ""
    impl = "auto" if active.call is None else active.call.impl
    if x.is_cuda:
        return "triton" if impl in ("auto", "triton") else ""
    if impl == "triton":
        return "triton" if interpreted() else ""
    return "numba" if impl != "reference" and x.is_cpu and x.numel() >= MIN_VALUES else ""


def _window(
    kernel_size: Size, stride: Size | None, padding: Size, ceil_mode: bool
) -> pool.Window | None:
    kernel, pad = _pair(kernel_size), _pair(padding)
    steps = kernel if stride is None else _pair(stride)
    if kernel is None or steps is None or pad is None:
        return None
    return pool.Window(kernel, steps, pad, bool(ceil_mode))


def _pair(size: Size) -> tuple[int, int] | None:
    """Return (rows, columns) as Python integers, or None for what PyTorch will refuse."""
    sizes = size if isinstance(size, tuple | list) else (size,)
    # PyTorch accepts integers of any type except bool.
    if len(sizes) not in (1, 2) or any(isinstance(s, bool) for s in sizes):
        return None
    try:
        return operator.index(sizes[0]), operator.index(sizes[-1])
    except TypeError:
        return None
