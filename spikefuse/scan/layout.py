"""How sequences lie in memory, so that kernels read and write any dense layout in place.

T: time steps; N: neurons of one step; `order`: the dims of a step, outermost in memory first.
Neuron n of a step lies at `(n // inner) * outer_stride + n % inner` after the step's start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spikefuse.kernels.channels import ChannelLayout

# Below this many adjacent elements, a copy is cheaper than reading in place.
MIN_INNER = 16
# A step that is one expanded value is copied as a row of at least this many neurons, for all rows.
MIN_ROW = 1 << 10
# Caches by strides are emptied when they are as long as this.
MAX_STRIDES = 64


@dataclass
class Layout:
    """The memory order that all tensors of one call share."""

    num_steps: int
    step_shape: tuple[int, ...]
    order: tuple[int, ...]
    inner: int

    def __post_init__(self) -> None:
        strides, stride = [0] * len(self.order), 1
        for d in reversed(self.order):
            strides[d] = stride
            stride *= max(self.step_shape[d], 1)
        self.num_neurons = math.prod(self.step_shape)
        self.step_strides = tuple(strides)
        #: Of a new sequence, time outermost.
        self.shape = (self.num_steps, *self.step_shape)
        self.all_strides = (self.num_neurons, *strides)
        self.channels = self.step_shape[1] if len(strides) > 1 else 1
        #: Neighbours in memory that share a channel: neuron n has channel (n // this) % C.
        self.channel_inner = strides[1] if len(strides) > 1 else self.num_neurons
        #: Outer strides of sequences seen so far, by their strides; None if kernels cannot read
        #: them.
        self.outer_strides: dict[tuple[int, ...], int | None] = {}

    def empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """A new sequence, time outermost."""
        return torch.empty_strided(self.shape, self.all_strides, dtype=dtype, device=like.device)

    def empty_step(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """One new time step."""
        return torch.empty_strided(self.step_shape, self.step_strides, dtype=dtype, device=device)

    def fits(self, x: Tensor) -> bool:
        """Whether kernels can read or write a sequence where it lies."""
        strides = x.stride()
        if strides not in self.outer_strides:
            if len(self.outer_strides) >= MAX_STRIDES:
                self.outer_strides.clear()
            self.outer_strides[strides] = outer_stride(x.shape, strides, self.order, self.inner)
        return self.outer_strides[strides] is not None

    def conform(self, x: Tensor) -> Tensor:
        """A sequence as it is where kernels can read it in this layout, else a copy."""
        if self.fits(x):
            return x
        if self.inner < self.num_neurons and _is_uniform(x.shape, x.stride()):
            values = x.as_strided((self.num_steps, 1), (x.stride(0), 1))
            row = values.expand(-1, self.inner).contiguous()
            strides = (stride if stride < self.inner else 0 for stride in self.step_strides)
            return row.as_strided(x.shape, (self.inner, *strides))
        if x.stride(0) == 0 and self.num_steps > 1:
            return self.empty_step(x.device, x.dtype).copy_(x[0]).expand(x.shape)
        return self.empty(x, x.dtype).copy_(x)

    def conform_step(self, x: Tensor) -> Tensor:
        """One step as a float32 tensor in this layout, copied only if it must be."""
        if x.dtype == torch.float32:
            strides = zip(x.shape, x.stride(), self.step_strides, strict=True)
            if x.stride() == self.step_strides or all(n == 1 or a == b for n, a, b in strides):
                return x
        return self.empty_step(x.device).copy_(x)

    def strides(self, x: Tensor) -> tuple[int, int]:
        """(time stride, outer stride) of a conforming sequence."""
        outer = self.outer_strides.get(x.stride())
        if outer is None:
            assert self.fits(x)
            outer = self.outer_strides[x.stride()]
            assert outer is not None
        return (x.stride(0) if self.num_steps > 1 else 0), outer

    def by_channel(self, count: int) -> ChannelLayout:
        """The array `[outer, channels, inner]` in `count` sums, one per channel, or per neuron in
        whole rows of channels."""
        channels = self.channels
        inner = 1 if count == channels else self.channel_inner
        return ChannelLayout(count // max(channels * inner, 1), channels, inner)

    def sum_by_channel(self, sums: Tensor) -> Tensor:
        """Sums per channel `[C]`, of what `by_channel` describes."""
        count = len(sums)
        return sums if count == self.channels else sums.view(self.by_channel(count)).sum((0, 2))

    def reduce_to(self, sums: Tensor, like: Tensor) -> Tensor:
        """Reduce sums to the gradient of a parameter: a scalar, or one value per channel."""
        return sums.sum() if like.ndim == 0 else self.sum_by_channel(sums)


def layout_of(tensors: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Layout:
    """The layout of a call from the (shape, strides) of its tensors: the order of the first one,
    split where any tensor needs it, or where it spares a copy of one with a value per step."""
    shape, strides = tensors[0]
    step, dims = tuple(shape[1:]), range(len(shape) - 1)
    # A batch of 1 is outermost whatever its stride, as in all memory formats of torch.
    order = tuple(sorted(dims, key=lambda d: ((d, step[d]) != (0, 1), -strides[d + 1], d)))
    total = math.prod(step)
    others = [x for x in tensors[1:] if not _is_uniform(*x)]
    inner = min(_inner(*x, order) for x in (tensors[0], *others))
    if len(others) < len(tensors) - 1:
        inner = min(inner, _row(step, order))
    fits = all(outer_stride(*x, order, inner) is not None for x in (tensors[0], *others))
    if fits and inner >= min(MIN_INNER, total):
        return Layout(shape[0], step, order, inner)
    if outer_stride(shape, strides, order, total) is None:
        # Not dense: the usual order of dims, into which the tensors are copied.
        order = tuple(dims)
    return Layout(shape[0], step, order, total)


def flatten_steps(x: Tensor) -> Tensor:
    """`x.flatten(0, 1)`, in canonical strides where it has one step.

    The strides that `flatten` and `unflatten` give a single sample in channels-last, (C, 1, ...),
    are misread by torch's native batch norm on a CPU: its gradient is wrong. With a dynamic batch
    size, the steps are copied: torch.export can't prove that a flattened view may be unflattened.
    """
    shape = x.shape
    if shape[0] == 1:
        return x.squeeze(0)
    return x.flatten(0, 1) if isinstance(shape[1], int) else torch.cat(x.unbind(0))


def unflatten_steps(x: Tensor, num_steps: int) -> Tensor:
    """`[T, B, ...]` of a sequence `[T * B, ...]`; see `flatten_steps`."""
    if num_steps == 1:
        return x.unsqueeze(0)
    return x.unflatten(0, (num_steps, x.shape[0] // num_steps))


def _inner(shape: Sequence[int], strides: Sequence[int], order: tuple[int, ...]) -> int:
    """Elements of a step that are adjacent in memory, in this order of dims."""
    inner = 1
    for d in reversed(order):
        if shape[d + 1] != 1 and strides[d + 1] != inner:
            break
        inner *= shape[d + 1]
    return inner


def _is_uniform(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether each step is an expanded value."""
    sizes = [*zip(shape[1:], strides[1:], strict=True)]
    return any(n != 1 for n, _ in sizes) and all(n == 1 or stride == 0 for n, stride in sizes)


def _row(step: tuple[int, ...], order: tuple[int, ...]) -> int:
    """Elements of the innermost dims of a step, at least `MIN_ROW` if there are as many."""
    row = 1
    for d in reversed(order):
        if row >= MIN_ROW:
            break
        row *= step[d]
    return row


def outer_stride(
    shape: Sequence[int], strides: Sequence[int], order: tuple[int, ...], inner: int
) -> int | None:
    """Distance of neighbouring groups of `inner` elements, or None if a step does not fit."""
    reached, outer, expected = 1, None, 0
    for d in reversed(order):
        size, stride = shape[d + 1], strides[d + 1]
        if size == 1:
            continue
        if reached < inner:
            if stride != reached:
                return None
        else:
            if outer is None:
                outer = expected = stride
            if stride != expected:
                return None
            expected = stride * size
        reached *= size
        if outer is None and reached > inner:
            return None
    return inner if outer is None else outer
