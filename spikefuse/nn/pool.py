"""Max pooling that keeps one byte per output for backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from spikefuse.compiler.launch import is_plain
from spikefuse.compiler.launch_triton import interpreted
from spikefuse.kernels import pool
from spikefuse.nn.neuron import calls

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
    """
    # With a dilation a window may lie in the padding alone, whose maximum is no value of the input.
    if torch.compiler.is_compiling() or dilation not in (1, (1, 1), [1, 1]):
        return F.max_pool2d(input, kernel_size, stride, padding, dilation, ceil_mode)
    maps = None
    if _by_kernel(input):
        kernel, pad = _pair(kernel_size), _pair(padding)
        steps = kernel if stride is None else _pair(stride)
        maps = pool.maps_of(input, pool.Window(kernel, steps, pad, bool(ceil_mode)))
    if maps is None:
        y = F.max_pool2d(input, kernel_size, stride, padding, 1, ceil_mode)
    else:
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


def _pair(size: Size) -> tuple[int, int]:
    """(rows, columns); (0, 0), which no window has, for what PyTorch refuses."""
    sizes = (size,) if isinstance(size, int) else tuple(size)
    if len(sizes) not in (1, 2):
        return 0, 0
    return sizes[0], sizes[-1]
