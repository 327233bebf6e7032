"""Values and gradients of a network, split into microbatches along the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spikefuse.memory.spikes import Saved, unpack
from spikefuse.scan.layout import flatten_steps, unflatten_steps

#: The samples (first, end), without `end`.
Microbatch = tuple[int, int]


def split(batch: int, num: int) -> list[Microbatch]:
    """Split a batch into at most `num` microbatches, none of them empty."""
    num = min(num, batch)
    return [(i * batch // num, (i + 1) * batch // num) for i in range(num)]


def unfolded(x: Tensor, batch: int) -> Tensor:
    """Return `[T, B, ...]` for a folded `[T*B, ...]`, or `[1, B, ...]` if all steps share `x`."""
    return unflatten_steps(x, x.shape[0] // batch)


def batch_size(microbatch: Microbatch) -> int:
    return microbatch[1] - microbatch[0]


def empty_batch(like: Tensor, batch: int) -> Tensor:
    """Return an empty `[T, batch, ...]` whose samples have the layout of `like` `[T, B, ...]`."""
    shape, size = like.shape[2:], math.prod(like.shape[2:])
    inner = torch.empty_like(like[0, 0], device="meta").stride()
    return like.new_empty_strided((len(like), batch, *shape), (batch * size, size, *inner))


class StateMemory(NamedTuple):
    """The memory layout of passed states: the same in all processes, whatever kernels write."""

    num: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: torch.device

    @classmethod
    def like(cls, x: Tensor, num: int) -> StateMemory:
        """For `num` states of a scan of `x` `[T, B, ...]`, sample after sample."""
        inner = torch.empty_like(x[0, 0], device="meta").stride()
        return cls(num, x.shape[2:], (math.prod(x.shape[2:]), *inner), x.device)

    def empty(self, batch: int) -> list[Tensor]:
        shape, dtype = (batch, *self.shape), torch.float32
        return [
            torch.empty_strided(shape, self.strides, dtype=dtype, device=self.device)
            for _ in range(self.num)
        ]

    def conform(self, states: Sequence[Tensor]) -> Sequence[Tensor]:
        if all(s.stride() == self.strides for s in states):
            return states
        return [y.copy_(s) for y, s in zip(self.empty(len(states[0])), states, strict=True)]


def take(saved: Sequence[tuple[Microbatch, Saved]], microbatch: Microbatch) -> Tensor:
    """Return a microbatch of a saved value, folded."""
    first, end = microbatch
    result: Tensor | None = None
    for (low, high), value in saved:
        if (low, high) == microbatch:
            return unpack(value)
        a, b = max(low, first), min(high, end)
        if a < b:
            piece = unfolded(unpack(value), high - low)[:, a - low : b - low]
            result = empty_batch(piece, end - first) if result is None else result
            result[:, a - first : b - first].copy_(piece)
    assert result is not None
    return flatten_steps(result)


class Gradient:
    """The folded gradient of a value, split into the microbatches in which it is read."""

    def __init__(self, microbatches: Sequence[Microbatch]) -> None:
        self.microbatches = microbatches
        self._sums: dict[Microbatch, Tensor] = {}
        # Microbatches whose sums were allocated here, so that they may be updated in place.
        self._own: set[Microbatch] = set()

    def __bool__(self) -> bool:
        return bool(self._sums)

    def get(self, microbatch: Microbatch) -> Tensor | None:
        return self._sums.get(microbatch)

    def pop(self, microbatch: Microbatch) -> Tensor | None:
        return self._sums.pop(microbatch, None)

    def add(self, microbatch: Microbatch, gradient: Tensor) -> None:
        """Accumulate the gradient of any range of samples."""
        if microbatch in self.microbatches:
            before = self._sums.get(microbatch)
            self._sums[microbatch] = gradient if before is None else before + gradient
            return
        first, end = microbatch
        unfolded_gradient = unfolded(gradient, end - first)
        for low, high in self.microbatches:
            a, b = max(low, first), min(high, end)
            if a < b:
                piece = unfolded_gradient[:, a - first : b - first]
                self._add_piece((low, high), a - low, piece)

    def _add_piece(self, microbatch: Microbatch, start: int, piece: Tensor) -> None:
        size = batch_size(microbatch)
        if microbatch not in self._own:
            total, before = empty_batch(piece, size), self._sums.get(microbatch)
            self._sums[microbatch] = flatten_steps(total)
            self._own.add(microbatch)
            if before is not None:
                total.copy_(unfolded(before, size))
            elif piece.shape[1] < size:
                total.zero_()
            else:
                total.copy_(piece)
                return
        unfolded(self._sums[microbatch], size)[:, start : start + piece.shape[1]] += piece
