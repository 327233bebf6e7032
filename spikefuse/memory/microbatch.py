"""Values and gradients of a network in parts of the batch: the samples from `first` up to `end`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from spikefuse.memory.spikes import Kept, unpack

#: (first, end)
Part = tuple[int, int]


def divided(batch: int, num: int) -> list[Part]:
    """The batch in `num` parts, none empty."""
    num = min(num, batch)
    return [(i * batch // num, (i + 1) * batch // num) for i in range(num)]


def rows(x: Tensor, batch: int) -> Tensor:
    """`[T, B, ...]` of a folded `[T*B, ...]`, and `[1, B, ...]` of what stands for all steps."""
    return x.unflatten(0, (-1, batch))


def size(part: Part) -> int:
    return part[1] - part[0]


def room(like: Tensor, batch: int) -> Tensor:
    """Unwritten `[T, batch, ...]`, each sample in memory as those of `like` `[T, B, ...]`."""
    strides = by_sample(like)
    return like.new_empty_strided(
        (len(like), batch, *like.shape[2:]), (batch * strides[0], *strides)
    )


def by_sample(x: Tensor) -> tuple[int, ...]:
    """Strides of one step of `x` `[T, B, ...]` whose samples lie one behind the other."""
    inner = torch.empty_like(x[0, 0], device="meta").stride()
    return math.prod(x.shape[2:]), *inner


def take(held: Sequence[tuple[Part, Kept]], part: Part) -> Tensor:
    """A part of a kept value, folded."""
    first, end = part
    whole: Tensor | None = None
    for (low, high), value in held:
        if (low, high) == part:
            return unpack(value)
        a, b = max(low, first), min(high, end)
        if a < b:
            piece = rows(unpack(value), high - low)[:, a - low : b - low]
            whole = room(piece, end - first) if whole is None else whole
            whole[:, a - first : b - first].copy_(piece)
    assert whole is not None
    return whole.flatten(0, 1)


class Gradient:
    """The gradient of a value, folded, in the parts in which it will be used."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self._sums: dict[Part, Tensor] = {}
        # Parts whose memory nobody else has.
        self._own: set[Part] = set()

    def __bool__(self) -> bool:
        return bool(self._sums)

    def get(self, part: Part) -> Tensor | None:
        return self._sums.get(part)

    def pop(self, part: Part) -> Tensor | None:
        return self._sums.pop(part, None)

    def add(self, part: Part, gradient: Tensor) -> None:
        """Add what a part of a reader gives, which may be any other part."""
        if part in self.parts:
            before = self._sums.get(part)
            self._sums[part] = gradient if before is None else before + gradient
            return
        first, end = part
        given = rows(gradient, end - first)
        for low, high in self.parts:
            a, b = max(low, first), min(high, end)
            if a < b:
                self._add_piece((low, high), a - low, given[:, a - first : b - first])

    def _add_piece(self, part: Part, at: int, piece: Tensor) -> None:
        size = part[1] - part[0]
        if part not in self._own:
            whole, before = room(piece, size), self._sums.get(part)
            if before is not None:
                whole.copy_(rows(before, size))
            elif piece.shape[1] < size:
                whole.zero_()
            self._sums[part] = whole.flatten(0, 1)
            self._own.add(part)
            if before is None and piece.shape[1] == size:
                whole.copy_(piece)
                return
        rows(self._sums[part], size)[:, at : at + piece.shape[1]] += piece
