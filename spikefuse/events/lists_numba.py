"""Lists of events on CPUs: made, read and put together.

Shape legend: R rows of events, E entries, W sites of a row, K ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from spikefuse.events.candidates import FIRED, SILENT
from spikefuse.events.format import Counts, Events
from spikefuse.events.vectors_numba import WORD, equal_bits
from spikefuse.kernels.numba_runtime import flat, kernel
from spikefuse.kernels.numba_threads import shared

_FIRED, _SILENT = np.float32(FIRED), np.float32(SILENT)

# In kernels they are called without the typing context, which no type checker knows.
_intrinsic: Any = intrinsic


@kernel
def pack(marks, at, m, fired, silent, word):
    """Marks of m columns to a bit each, in words from `word` on."""
    for first in range(0, m, WORD):
        fired[word + first // WORD] = equal_bits(marks, at + first, _FIRED, m - first)
        silent[word + first // WORD] = equal_bits(marks, at + first, _SILENT, m - first)


@kernel
def _pack_rows(first, last, marks, width, words, fired, silent):
    for r in range(first, last):
        pack(marks, r * width, width, fired, silent, r * words)


@kernel
def _count(first, last, words, fired, silent, counts, others):
    for r in range(first, last):
        spikes = near = 0
        for w in range(r * words, (r + 1) * words):
            spikes += _ones(fired[w])
            near += _ones(silent[w])
        counts[r], others[r] = spikes, near


@kernel
def _fill(first, last, words, fired, silent, offsets, counts, indices):
    places = np.empty(words, np.int32)
    for r in range(first, last):
        spike = offsets[r]
        _fill_row(fired, r * words, words, indices, spike, places)
        _fill_row(silent, r * words, words, indices, spike + counts[r], places)


@kernel
def _fill_row(bits, first, words, indices, place, places):
    # Which words have none is hard to foresee: those that have some are listed without asking.
    count = 0
    for w in range(words):
        places[count] = w
        count += bits[first + w] != 0
    for k in range(count):
        w = places[k]
        place = _fill_word(bits[first + w], w * WORD, indices, place)


@kernel
def _fill_word(left, first, indices, place):
    while left:
        indices[place] = first + _lowest(left)
        place += 1
        left &= left - np.uint32(1)
    return place


@_intrinsic
def _ones(typing_context: Any, word: Any) -> Any:
    """The number of ones in a word."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int32(types.uint32), generate


@_intrinsic
def _lowest(typing_context: Any, word: Any) -> Any:
    """The place of the lowest one in a word that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int32(types.uint32), generate


@kernel
def _mark(first, last, offsets, fired, values):
    for r in range(first, last):
        for e in range(offsets[r], offsets[r] + fired[r]):
            values[e] = np.float32(1.0)


def values(events: Events) -> Tensor:
    """See `Events.is_fired`."""
    marks = np.zeros(len(events.indices), np.float32)
    offsets, fired, _ = lists(events)
    shared(_mark, len(fired), 1, len(marks), offsets, fired, marks)
    return torch.from_numpy(marks)


def rows(events: Events) -> Tensor:
    """See `Events.rows`."""
    size = len(events.indices)
    return torch.repeat_interleave(
        torch.arange(events.num_rows), events.offsets.diff(), output_size=size
    )


def dense(events: Events, values: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`[R, W]`: `values` of the entries at their sites, of None the spikes; 0 elsewhere."""
    values = events.is_fired() if values is None else values
    out = torch.zeros(events.num_rows, events.shape[2], dtype=dtype)
    return out.index_put_((events.rows(), events.indices.long()), values.to(dtype))


def places(events: Events, offsets: Tensor, number: int) -> Tensor:
    """int64 `[number]`: the entries that stay where row r keeps its first ones, as many as there
    are from `offsets[r]` to `offsets[r + 1]`, `number` in all."""
    before = (events.offsets - offsets)[:-1]
    skipped = torch.repeat_interleave(before, offsets.diff(), output_size=number)
    return torch.arange(number) + skipped


@kernel
def _merge(first, last, indices, lowest, counts, starts, offsets, fired, rank, whole, values, mine):
    for r in range(first, last):
        spike = offsets[r]
        other = spike + fired[r]
        for k in range(len(counts)):
            begin = starts[k, r]
            for e in range(begin, starts[k, r + 1]):
                if e < begin + counts[k, 0, r]:
                    place = spike
                    values[place] = np.float32(1.0)
                    spike += 1
                else:
                    place = other
                    values[place] = np.float32(0.0)
                    other += 1
                whole[place] = indices[k, e] + lowest[k]
                if k == rank:
                    mine[e] = place


def merged(
    indices: Tensor, first: Tensor, counts: Counts, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(indices of `Events`, the values of their entries, the places of those of `rank`): see
    `events.merged`."""
    total = sum(counts.sizes)
    whole, values = np.empty(total, np.int32), np.empty(total, np.float32)
    mine = np.empty(counts.sizes[rank], np.int64)
    given = (x.numpy() for x in (indices, first, *counts[:4]))
    shared(_merge, len(counts.fired), 1, total, *given, rank, whole, values, mine)
    return torch.from_numpy(whole), torch.from_numpy(values), torch.from_numpy(mine)


def words_of(width: int) -> int:
    return -(-width // WORD)


class Marked:
    """See `events.marked`; from bits `[R, words]`."""

    def __init__(self, fired: np.ndarray, silent: np.ndarray) -> None:
        rows, self.words = fired.shape
        self.bits = fired.reshape(-1), silent.reshape(-1)
        self.counts, others = np.empty(rows, np.int32), np.empty(rows, np.int32)
        self._share(_count, self.counts, others)
        self.fired, self.entries = (
            torch.from_numpy(x) for x in (self.counts, self.counts + others)
        )

    def sites(self, offsets: Tensor, room: int) -> Tensor:
        indices = np.empty(room, np.int32)
        self._share(_fill, offsets.numpy(), self.counts, indices)
        return torch.from_numpy(indices)

    def _share(self, function: Any, *arrays: np.ndarray) -> None:
        rows, words = len(self.counts), self.words
        shared(function, rows, 1, rows * words, words, *self.bits, *arrays)


def lists_of(fired: np.ndarray, silent: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """(offsets, fired, indices) of `Events` from bits `[R, words]`."""
    found = Marked(fired, silent)
    offsets = F.pad(found.entries.cumsum(0), (1, 0))
    return offsets, found.fired, found.sites(offsets, int(offsets[-1]))


def marked(marks: Tensor) -> Marked:
    """See `events.marked`; of marks `[R, W]`, float32."""
    rows, width = marks.shape
    words = words_of(width)
    fired, silent = np.empty((rows, words), np.uint32), np.empty((rows, words), np.uint32)
    arguments = flat(marks.contiguous()), width, words, fired.reshape(-1), silent.reshape(-1)
    shared(_pack_rows, rows, 1, rows * width, *arguments)
    return Marked(fired, silent)


def unpacked(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(offsets, fired, indices) of `Events` from bits `[R, S]`, uint8."""
    missing = -rows.shape[1] % 4
    bits = np.pad(rows.numpy(), ((0, 0), (0, missing))).view("<u4").astype(np.uint32)
    return lists_of(bits, np.zeros_like(bits))


def lists(events: Events) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return events.offsets.numpy(), events.fired.numpy(), events.indices.numpy()
