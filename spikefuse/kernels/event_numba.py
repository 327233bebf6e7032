"""Products with event lists on CPUs: whole rows of weights are added, a tile of columns at a time.

Weights are `[in, out]`, so that the row of an input is contiguous. A tile of their columns stays in
a core's cache while all rows of events go by; each thread has tiles of its own. Only the gradients
of the events' values are summed in another order where there are other tiles.

Shape legend: R rows of events, E entries, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from spikefuse.compiler.numba_runtime import (
    advise_huge_pages,
    flat,
    kernel,
    load,
    move_to_huge_pages,
    shared,
    store,
)
from spikefuse.kernels.event_vectors import dots, prefetch, sum_rows
from spikefuse.kernels.events import Events
from spikefuse.neurons.candidates import FIRED, SILENT

# Columns of a tile: at most so many that its weights fit a core's cache, at least so many that
# adding a row is worth it; whole words of bits.
WIDEST, NARROWEST = 512, 64
# A word of bits.
WORD = 32
# Rows of weights or their gradients are asked for so many inputs before they are used.
AHEAD = 3
_FIRED, _SILENT = np.float32(FIRED), np.float32(SILENT)

# In kernels they are called without the typing context, which no type checker knows.
_intrinsic: Any = intrinsic

# A sum that is only compared with 0 may be added up in any order.
_summed = kernel(fastmath={"reassoc", "contract"})


def tile_of(width: int) -> int:
    """Columns of a tile: fewer where there are more threads than wide tiles."""
    share = -(-width // (torch.get_num_threads() * WORD)) * WORD
    return min(max(share, NARROWEST), WIDEST)


@kernel
def add_to(target, first, m, grad, at):
    """`target[first + k] += grad[at + k]`."""
    for k in range(m):
        store(target, first + k, load(target, first + k, 0) + load(grad, at + k, 1), 0)


@_summed
def pack(marks, at, m, fired, silent, word):
    """Marks of m columns to a bit each, in words from `word` on."""
    for first in range(0, m, WORD):
        # Of most words all are 0, which their sum tells; a whole word's is vectorised.
        seen = np.float32(0.0)
        if first + WORD <= m:
            for k in range(WORD):
                seen += load(marks, at + first + k, 0)
        else:
            for k in range(m - first):
                seen += load(marks, at + first + k, 0)
        bits, others = np.uint32(0), np.uint32(0)
        if seen > np.float32(0.0):
            for k in range(min(WORD, m - first)):
                mark = load(marks, at + first + k, 0)
                bits |= np.uint32(mark == _FIRED) << np.uint32(k)
                others |= np.uint32(mark == _SILENT) << np.uint32(k)
        fired[word + first // WORD] = bits
        silent[word + first // WORD] = others


@kernel
def _pack_rows(first, last, marks, width, words, fired, silent):
    for r in range(first, last):
        pack(marks, r * width, width, fired, silent, r * words)


@kernel
def _count(first, last, words, fired, silent, counts, others):
    for r in range(first, last):
        for w in range(r * words, (r + 1) * words):
            if fired[w] | silent[w]:
                counts[r] += _ones(fired[w])
                others[r] += _ones(silent[w])


@kernel
def _fill(first, last, words, fired, silent, offsets, counts, indices):
    for r in range(first, last):
        spike = offsets[r]
        other = spike + counts[r]
        for w in range(words):
            bits, near = fired[r * words + w], silent[r * words + w]
            if bits | near:
                spike = _fill_word(bits, w * WORD, indices, spike)
                other = _fill_word(near, w * WORD, indices, other)


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


def values(offsets: Tensor, fired: Tensor) -> Tensor:
    """float32 `[E]`: 1 for the entries that fired, else 0."""
    marks = np.zeros(int(offsets[-1]), np.float32)
    shared(_mark, len(fired), 1, len(marks), offsets.numpy(), fired.numpy(), marks)
    return torch.from_numpy(marks)


def words_of(width: int) -> int:
    return -(-width // WORD)


def lists_of(fired: np.ndarray, silent: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """(offsets, fired, indices) of `Events` from bits `[R, words]`."""
    rows, words = fired.shape
    counts, others = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    bits = fired.reshape(-1), silent.reshape(-1)
    shared(_count, rows, 1, rows * words, words, *bits, counts, others)
    offsets = np.zeros(rows + 1, np.int64)
    np.cumsum(counts + others, out=offsets[1:])
    indices = np.empty(offsets[-1], np.int32)
    shared(_fill, rows, 1, rows * words, words, *bits, offsets, counts, indices)
    return torch.from_numpy(offsets), torch.from_numpy(counts), torch.from_numpy(indices)


def listed(marks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(offsets, fired, indices) of `Events` from marks `[R, W]`, float32."""
    rows, width = marks.shape
    words = words_of(width)
    fired, silent = np.empty((rows, words), np.uint32), np.empty((rows, words), np.uint32)
    arguments = flat(marks.contiguous()), width, words, fired.reshape(-1), silent.reshape(-1)
    shared(_pack_rows, rows, 1, rows * width, *arguments)
    return lists_of(fired, silent)


def unpacked(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(offsets, fired, indices) of `Events` from bits `[R, S]`, uint8."""
    missing = -rows.shape[1] % 4
    bits = np.pad(rows.numpy(), ((0, 0), (0, missing))).view("<u4").astype(np.uint32)
    return lists_of(bits, np.zeros_like(bits))


@kernel
def _forward(first, last, size, out, weight, bias, width, offsets, fired, indices):
    for column in range(first, last, size):
        m = min(size, width - column)
        for r in range(len(fired)):
            begin = offsets[r]
            end = begin + fired[r]
            at = r * width + column
            sum_rows(out, at, bias, column, weight, width, column, m, indices, begin, end)


def currents(events: Events, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`[R, O]`: for each row the bias and the rows of `weight [I, O]` of the inputs that fired."""
    width = weight.shape[1]
    move_to_huge_pages(weight)
    out = torch.empty(events.num_rows, width)
    size = tile_of(width)
    arguments = size, flat(out), flat(weight), flat(given(bias, width)), width, *lists(events)
    work = out.numel() + width * len(events.indices)
    shared(_forward, width, size, work, *arguments)
    return out


def row_listed(spikes: Tensor) -> tuple[Tensor, Tensor]:
    """(indices, their number int32 `[1]`) of spikes `[W]`, 0 or 1."""
    _, count, indices = listed(spikes[None] * FIRED)
    return indices, count


def row_sum(weight: Tensor, bias: Tensor | None, indices: Tensor, count: Tensor) -> Tensor:
    """`[O]`: the bias and the rows of `weight [I, O]` of the first `count` indices."""
    offsets = torch.zeros(2, dtype=torch.int64)
    offsets[1:] = count
    events = Events((1, 1, len(weight)), offsets, count, indices)
    return currents(events, weight, bias)[0]


@kernel
def _backward(
    first, last, size, grad, target, bias, partial, weight, width, num_rows, spikes, entries
):
    fresh = np.empty(target.size // width, np.bool_)
    for column in range(first, last, size):
        m = min(size, width - column)
        fresh[:] = True
        add_by_input(target, width, column, m, fresh, grad, width, column, 0, spikes)
        clear(target, width, column, m, fresh)
        for r in range(num_rows):
            add_to(bias, column, m, grad, r * width + column)
        if partial.size:
            mine = partial[column // size]
            dots_by_input(mine, weight, width, column, m, grad, width, column, 0, entries)


@kernel
def add_by_input(target, width, column, m, fresh, grad, stride, place, group, by_input):
    """`target[slot, column + k] += sum of grad[r, place + k]` for every input of a group that
    fired, over the rows r in which it did. A fresh slot holds nothing yet."""
    bases, counts, slots, ends, rows, _ = by_input
    begin, zeros = np.int64(bases[group]), np.zeros(m, np.float32)
    for s in range(bases[group], bases[group] + counts[group]):
        at = slots[s] * width + column
        end = np.int64(ends[s])
        if s + AHEAD < bases[group] + counts[group]:
            prefetch(target, slots[s + AHEAD] * width + column, m)
        if fresh[slots[s]]:
            fresh[slots[s]] = False
            sum_rows(target, at, zeros, 0, grad, stride, place, m, rows, begin, end)
        else:
            sum_rows(target, at, target, at, grad, stride, place, m, rows, begin, end)
        begin = end


@kernel
def dots_by_input(out, weight, width, column, m, grad, stride, place, group, by_input):
    """`out[e] = sum over k of weight[i, column + k] grad[r, place + k]` for every entry e of a
    group, i its input and r its row."""
    bases, counts, inputs, ends, rows, entries = by_input
    begin = np.int64(bases[group])
    for s in range(bases[group], bases[group] + counts[group]):
        at, end = inputs[s] * width + column, np.int64(ends[s])
        # Rows lie too far apart for the processor to see the next one coming.
        if s + AHEAD < bases[group] + counts[group]:
            prefetch(weight, inputs[s + AHEAD] * width + column, m)
        dots(out, weight, at, m, grad, stride, place, rows, entries, begin, end)
        begin = end


@kernel
def clear(target, width, column, m, fresh):
    """`target[slot, column + k] = 0` where nothing has been added."""
    for slot in range(len(fresh)):
        if fresh[slot]:
            at = slot * width + column
            target[at : at + m] = np.float32(0.0)


@kernel
def _sort(
    first,
    last,
    T,
    B,
    size,
    inputs,
    offsets,
    stops,
    indices,
    bases,
    counts,
    heads,
    ends,
    rows,
    entries,
):
    place = np.empty(inputs, np.int32)
    for group in range(first, last):
        begin, end = group * size, min((group + 1) * size, B)
        place[:] = 0
        for b in range(begin, end):
            for t in range(T):
                for e in range(offsets[t * B + b], stops[t * B + b]):
                    place[indices[e]] += 1
        s = at = bases[group]
        for i in range(inputs):
            if place[i]:
                heads[s], ends[s] = i, at + place[i]
                place[i], at = at, ends[s]
                s += 1
        counts[group] = s - bases[group]
        for b in range(begin, end):
            for t in range(T):
                for e in range(offsets[t * B + b], stops[t * B + b]):
                    k = place[indices[e]]
                    rows[k], entries[k] = (b - begin) * T + t, e
                    place[indices[e]] = k + 1


def by_input(
    events: Events, num_steps: int, batch: int, size: int, silent: bool = False
) -> tuple[np.ndarray, ...]:
    """The spikes of each group of samples in the order of their inputs.

    Args:
        num_steps, batch: of the events, or (R, 1), which makes one sample of all.
        size: samples of a group; the last may have fewer.
        silent: the other candidates too.

    Returns:
        (bases, counts, heads, ends, rows, entries): a group has the inputs `heads[s]` for s from
        `bases[group]` on, `counts[group]` of them. Those of s are the places from `ends[s - 1]`, of
        the first from `bases[group]`, to `ends[s]`: at each place an entry and its row in the
        group, b T + t with b counted from the group's first sample.
    """
    offsets, fired, indices = lists(events)
    stops = offsets[1:] if silent else offsets[:-1] + fired
    totals = np.zeros(batch + 1, np.int32)
    np.cumsum((stops - offsets[:-1]).reshape(num_steps, batch).sum(0), out=totals[1:])
    bases = totals[np.minimum(np.arange(0, batch + size, size), batch)]
    counts = np.empty(len(bases) - 1, np.int32)
    arrays = tuple(np.zeros(totals[-1], np.int32) for _ in range(4))
    found = bases, counts, *arrays
    work = int(totals[-1]) + len(counts) * events.shape[2]
    sizes = num_steps, batch, size, events.shape[2]
    shared(_sort, len(counts), 1, work, *sizes, offsets, stops, indices, *found)
    return found


def gradients(
    events: Events, grad: Tensor, weight: Tensor, sparse: bool
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
    """What `Gradients.finished` gives, from the gradient `[R, O]` of `currents`."""
    work = Gradients(events, weight, sparse, (events.num_rows, 1), 1)
    width = weight.shape[1]
    arguments = work.size, flat(grad.contiguous()), *work.results, flat(weight), width
    lists = events.num_rows, work.spikes, work.entries
    shared(_backward, width, work.size, grad.numel(), *arguments, *lists)
    return work.finished()


class Gradients:
    """Room for the gradients of a product with events.

    Args:
        events: its inputs.
        weight: `[I, O]`.
        sparse: the weights' gradient has only the rows of inputs that fired.
        samples, group: see `by_input`.
    """

    def __init__(
        self, events: Events, weight: Tensor, sparse: bool, samples: tuple[int, int], group: int
    ) -> None:
        inputs, width = weight.shape
        bases, counts, slots, *places = by_input(events, *samples, group)
        self.touched = None
        if sparse:
            self.touched, slots = _touched(inputs, bases, counts, slots)
            inputs = len(self.touched)
        self.spikes = bases, counts, slots, *places
        wanted = events.values is not None
        # Something of the same kind where it is not wanted.
        self.entries = by_input(events, *samples, group, silent=True) if wanted else self.spikes
        self.weight = torch.empty(inputs, width)
        advise_huge_pages(self.weight)
        self.bias = np.zeros(width, np.float32)
        self.size = tile_of(width)
        tiles = -(-width // self.size) if wanted else 0
        self.partial = np.empty((tiles, len(events.indices)), np.float32)
        self.results = flat(self.weight), self.bias, self.partial

    def finished(self) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
        """(the rows int64 `[K]` that the weights' gradient has, or None for all; that gradient
        `[K, O]`; that of the bias `[O]`; that of the events' values `[E]` if they have any)."""
        values = torch.from_numpy(self.partial.sum(0)) if len(self.partial) else None
        rows = None if self.touched is None else torch.from_numpy(self.touched)
        return rows, self.weight, torch.from_numpy(self.bias), values


def _touched(
    inputs: int, bases: np.ndarray, counts: np.ndarray, heads: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The inputs that fired, int64, and for each of `heads` its place among them."""
    seen = np.zeros(inputs, bool)
    for base, count in zip(bases[:-1], counts, strict=True):
        seen[heads[base : base + count]] = True
    places = np.cumsum(seen, dtype=np.int32) - np.int32(1)
    return np.flatnonzero(seen), places[heads]


def given(bias: Tensor | None, width: int) -> Tensor:
    return torch.zeros(width) if bias is None else bias


def lists(events: Events) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return events.offsets.numpy(), events.fired.numpy(), events.indices.numpy()
