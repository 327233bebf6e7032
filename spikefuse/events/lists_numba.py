"""Build and read event lists on CPUs.

Shape legend: R rows, E entries, W sites of a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from spikefuse.events.lists import FIRED, NEAR, EventLists
from spikefuse.kernels.numba_host import flat, shared
from spikefuse.kernels.numba_runtime import kernel
from spikefuse.kernels.vectors_numba import WORD, equal_bits

_FIRED, _NEAR = np.float32(FIRED), np.float32(NEAR)

# Kernels call intrinsics without the typing context, which type checkers don't know.
_intrinsic: Any = intrinsic


@kernel
def pack(marks, at, m, fired, near, word):
    """Pack the marks of m columns into bits, in words from `word` on."""
    for first in range(0, m, WORD):
        fired[word + first // WORD] = equal_bits(marks, at + first, _FIRED, m - first)
        near[word + first // WORD] = equal_bits(marks, at + first, _NEAR, m - first)


@kernel
def _pack_rows(first, last, marks, width, words, fired, near):
    for r in range(first, last):
        pack(marks, r * width, width, fired, near, r * words)


@kernel
def _count(first, last, words, fired, near, spikes, entries):
    for r in range(first, last):
        num_fired = num_near = 0
        for w in range(r * words, (r + 1) * words):
            num_fired += _popcount(fired[w])
            num_near += _popcount(near[w])
        spikes[r], entries[r] = num_fired, num_fired + num_near


@kernel
def _fill(first, last, words, fired, near, offsets, spikes, indices):
    nonzero = np.empty(words, np.int32)
    for r in range(first, last):
        begin = offsets[r]
        _fill_row(fired, r * words, words, indices, begin, nonzero)
        _fill_row(near, r * words, words, indices, begin + spikes[r], nonzero)


@kernel
def _fill_row(bits, first, words, indices, place, nonzero):
    # Without a branch, because it is hard to predict which words are 0.
    count = 0
    for w in range(words):
        nonzero[count] = w
        count += bits[first + w] != 0
    for k in range(count):
        w = nonzero[k]
        rest = bits[first + w]
        while rest:
            indices[place] = w * WORD + _popcount(~rest & (rest - np.uint32(1)))  # lowest one
            place += 1
            rest &= rest - np.uint32(1)


@_intrinsic
def _popcount(typing_context: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int32(types.uint32), generate


class PackedMarks:
    """Counted marks, as bits `[R, words]`; see `CountedMarks`."""

    def __init__(self, fired: np.ndarray, near: np.ndarray) -> None:
        rows, self.words = fired.shape
        self.bits = fired.reshape(-1), near.reshape(-1)
        self.fired, self.entries = (torch.empty(rows, dtype=torch.int32) for _ in range(2))
        self._run(_count, self.fired, self.entries)

    def sites(self, offsets: Tensor, size: int) -> Tensor:
        indices = torch.empty(size, dtype=torch.int32)
        self._run(_fill, offsets, self.fired, indices)
        return indices

    def lists(self) -> EventLists:
        offsets = F.pad(self.entries.cumsum(0), (1, 0))
        return EventLists(offsets, self.fired, self.sites(offsets, int(offsets[-1])))

    def _run(self, function: Any, *tensors: Tensor) -> None:
        rows, words = len(self.fired), self.words
        arrays = *self.bits, *(x.numpy() for x in tensors)
        shared(function, rows, 1, rows * words, words, *arrays)


def num_words(width: int) -> int:
    """Return the number of words that hold one bit per site."""
    return -(-width // WORD)


def count_marks(marks: Tensor) -> PackedMarks:
    """Count the entries of marks `[R, W]`, float32."""
    rows, width = marks.shape
    words = num_words(width)
    fired, near = np.empty((rows, words), np.uint32), np.empty((rows, words), np.uint32)
    arguments = flat(marks.contiguous()), width, words, fired.reshape(-1), near.reshape(-1)
    shared(_pack_rows, rows, 1, rows * width, *arguments)
    return PackedMarks(fired, near)


def unpack(rows: Tensor) -> EventLists:
    """List the spikes of bits `[R, S]`, uint8."""
    missing = -rows.shape[1] % 4
    bits = np.pad(rows.numpy(), ((0, 0), (0, missing))).view("<u4").astype(np.uint32)
    return PackedMarks(bits, np.zeros_like(bits)).lists()


@kernel
def _mark_fired(first, last, offsets, fired, values):
    for r in range(first, last):
        for e in range(offsets[r], offsets[r] + fired[r]):
            values[e] = np.float32(1.0)


def is_fired(lists: EventLists) -> Tensor:
    """Return float32 `[E]`: 1 for entries that fired, else 0."""
    values = np.zeros(len(lists.indices), np.float32)
    offsets, fired, _ = arrays(lists)
    shared(_mark_fired, len(fired), 1, len(values), offsets, fired, values)
    return torch.from_numpy(values)


def dense(lists: EventLists, width: int, values: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `[R, width]`: `values` at the sites of the entries, or the spikes if it is None."""
    values = is_fired(lists) if values is None else values
    out, rows = torch.zeros(len(lists.fired), width, dtype=dtype), torch.arange(len(lists.fired))
    rows = rows.repeat_interleave(lists.offsets.diff(), output_size=len(lists.indices))
    return out.index_put_((rows, lists.indices.long()), values.to(dtype))


def arrays(lists: EventLists) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return lists.offsets.numpy(), lists.fired.numpy(), lists.indices.numpy()
