"""Products with event lists on CPUs: whole rows of weights are added, a tile of columns at a time.

Weights are `[in, out]`, so that the row of an input is contiguous. A tile of their columns stays in
a core's cache while all rows of events go by; each thread has tiles of its own. Only the gradients
of the events' values are summed in another order where there are other tiles.

Shape legend: R rows of events, E entries, I inputs, O outputs.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from spikefuse.compiler.numba_runtime import advise_huge_pages, flat, kernel, load, shared, store
from spikefuse.kernels.events import Events
from spikefuse.neurons.candidates import FIRED, SILENT

# Columns of a tile: at most so many that its weights fit a core's cache, at least so many that
# adding a row is worth it; whole words of bits.
WIDEST, NARROWEST = 256, 64
# A word of bits.
WORD = 32
_FIRED, _SILENT = np.float32(FIRED), np.float32(SILENT)

# A dot product may be summed in any order: it is part of a gradient.
_summed = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract"})


def tile_of(width: int) -> int:
    """Columns of a tile: fewer where there are more threads than wide tiles."""
    share = -(-width // (torch.get_num_threads() * WORD)) * WORD
    return min(max(share, NARROWEST), WIDEST)


@kernel
def add_rows(out, at, source, stride, column, m, rows, begin, end):
    """`out[at + k] += sum of source[r, column + k]` over the rows r that are listed."""
    e = begin
    # Four at a time: the sum is read and written once for them.
    while e + 4 <= end:
        a, b = rows[e] * stride + column, rows[e + 1] * stride + column
        c, d = rows[e + 2] * stride + column, rows[e + 3] * stride + column
        for k in range(m):
            two = load(source, a + k, 1) + load(source, b + k, 1)
            more = load(source, c + k, 1) + load(source, d + k, 1)
            store(out, at + k, load(out, at + k, 0) + (two + more), 0)
        e += 4
    while e < end:
        add_to(out, at, m, source, rows[e] * stride + column)
        e += 1


@kernel
def sum_rows(out, at, weight, bias, width, column, m, inputs, begin, end):
    """`out[at + k] = bias[column + k] + sum of weight[i, column + k]` over the inputs listed."""
    for k in range(m):
        store(out, at + k, load(bias, column + k, 1), 0)
    add_rows(out, at, weight, width, column, m, inputs, begin, end)


@kernel
def add_to(target, first, m, grad, at):
    """`target[first + k] += grad[at + k]`."""
    for k in range(m):
        store(target, first + k, load(target, first + k, 0) + load(grad, at + k, 1), 0)


@_summed
def dots(out, weight, width, column, m, inputs, begin, end, grad, at):
    """`out[e] = sum over k of weight[i, column + k] grad[at + k]` for the entries' inputs i."""
    e = begin
    # Four at a time: the gradient is read once for them.
    while e + 4 <= end:
        a, b = inputs[e] * width + column, inputs[e + 1] * width + column
        c, d = inputs[e + 2] * width + column, inputs[e + 3] * width + column
        first = second = third = fourth = np.float32(0.0)
        for k in range(m):
            g = load(grad, at + k, 1)
            first += load(weight, a + k, 0) * g
            second += load(weight, b + k, 0) * g
            third += load(weight, c + k, 0) * g
            fourth += load(weight, d + k, 0) * g
        out[e], out[e + 1], out[e + 2], out[e + 3] = first, second, third, fourth
        e += 4
    while e < end:
        a = inputs[e] * width + column
        total = np.float32(0.0)
        for k in range(m):
            total += load(weight, a + k, 0) * load(grad, at + k, 1)
        out[e] = total
        e += 1


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
        _fill_row(fired, r * words, words, indices, offsets[r])
        _fill_row(silent, r * words, words, indices, offsets[r] + counts[r])


@kernel
def _fill_row(bits, first, words, indices, place):
    for w in range(words):
        left = bits[first + w]
        while left:
            lowest = left & (~left + np.uint32(1))
            indices[place] = w * WORD + _ones(lowest - np.uint32(1))
            place += 1
            left ^= lowest


@kernel
def _ones(x):
    """The number of ones in a word."""
    x = x - ((x >> np.uint32(1)) & np.uint32(0x55555555))
    x = (x & np.uint32(0x33333333)) + ((x >> np.uint32(2)) & np.uint32(0x33333333))
    x = (x + (x >> np.uint32(4))) & np.uint32(0x0F0F0F0F)
    return np.int32((x * np.uint32(0x01010101) & np.uint32(0xFFFFFFFF)) >> np.uint32(24))


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
            sum_rows(out, r * width + column, weight, bias, width, column, m, indices, begin, end)


def currents(events: Events, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`[R, O]`: for each row the bias and the rows of `weight [I, O]` of the inputs that fired."""
    width = weight.shape[1]
    out = torch.empty(events.num_rows, width)
    size = tile_of(width)
    arguments = size, flat(out), flat(weight), flat(given(bias, width)), width, *lists(events)
    shared(_forward, width, size, out.numel(), *arguments)
    return out


@kernel
def _backward(
    first, last, size, grad, target, bias, partial, weight, width,
    offsets, indices, bases, counts, slots, ends, rows,
):  # fmt: skip
    fresh = np.empty(target.size // width, np.bool_)
    for column in range(first, last, size):
        m = min(size, width - column)
        fresh[:] = True
        add_by_input(
            *(target, width, column, m, fresh, grad, width, column),
            *(0, bases, counts, slots, ends, rows),
        )
        clear(target, width, column, m, fresh)
        for r in range(len(offsets) - 1):
            at = r * width + column
            add_to(bias, column, m, grad, at)
            if partial.size:
                mine, begin, end = partial[column // size], offsets[r], offsets[r + 1]
                dots(mine, weight, width, column, m, indices, begin, end, grad, at)


@kernel
def add_by_input(
    target, width, column, m, fresh, grad, stride, place, b, bases, counts, slots, ends, rows
):
    """`target[slot, column + k] += sum of grad[r, place + k]` for every input of sample b that
    fired, over the rows r in which it did; see `by_input`. A fresh slot holds nothing yet."""
    begin = np.int64(bases[b])
    for s in range(bases[b], bases[b] + counts[b]):
        at = slots[s] * width + column
        if fresh[slots[s]]:
            fresh[slots[s]] = False
            target[at : at + m] = np.float32(0.0)
        add_rows(target, at, grad, stride, place, m, rows, begin, ends[s])
        begin = np.int64(ends[s])


@kernel
def clear(target, width, column, m, fresh):
    """`target[slot, column + k] = 0` where nothing has been added."""
    for slot in range(len(fresh)):
        if fresh[slot]:
            at = slot * width + column
            target[at : at + m] = np.float32(0.0)


@kernel
def _sort(first, last, T, B, inputs, offsets, fired, indices, bases, counts, heads, ends, rows):
    place = np.empty(inputs, np.int32)
    for b in range(first, last):
        place[:] = 0
        for t in range(T):
            r = t * B + b
            for e in range(offsets[r], offsets[r] + fired[r]):
                place[indices[e]] += 1
        s = begin = bases[b]
        for i in range(inputs):
            if place[i]:
                heads[s], ends[s] = i, begin + place[i]
                place[i], begin = begin, ends[s]
                s += 1
        counts[b] = s - bases[b]
        for t in range(T):
            r = t * B + b
            for e in range(offsets[r], offsets[r] + fired[r]):
                rows[place[indices[e]]] = t
                place[indices[e]] += 1


def by_input(events: Events, num_steps: int, batch: int) -> tuple[np.ndarray, ...]:
    """The spikes of each sample in the order of their inputs.

    Args:
        num_steps, batch: of the events, or (R, 1), which makes one sample of all.

    Returns:
        (bases, counts, heads, ends, rows): sample b has the inputs `heads[s]` for s from `bases[b]`
        on, `counts[b]` of them. They fired in the steps `rows[ends[s - 1] : ends[s]]`, those of the
        first from `bases[b]` on.
    """
    offsets, fired, indices = lists(events)
    bases = np.zeros(batch + 1, np.int32)
    np.cumsum(fired.reshape(num_steps, batch).sum(0), out=bases[1:])
    counts, total = np.empty(batch, np.int32), int(bases[-1])
    heads, ends, rows = (np.zeros(total, np.int32) for _ in range(3))
    found = bases, counts, heads, ends, rows
    work = total + batch * events.shape[2]
    sizes = num_steps, batch, events.shape[2]
    shared(_sort, batch, 1, work, *sizes, offsets, fired, indices, *found)
    return found


def gradients(
    events: Events, grad: Tensor, weight: Tensor, sparse: bool
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
    """What `Gradients.finished` gives, from the gradient `[R, O]` of `currents`."""
    work = Gradients(events, weight, sparse, (events.num_rows, 1))
    width = weight.shape[1]
    arguments = work.size, flat(grad.contiguous()), *work.results, flat(weight), width
    lists = events.offsets.numpy(), events.indices.numpy(), *work.lists
    shared(_backward, width, work.size, grad.numel(), *arguments, *lists)
    return work.finished()


class Gradients:
    """Room for the gradients of a product with events.

    Args:
        events: its inputs.
        weight: `[I, O]`.
        sparse: the weights' gradient has only the rows of inputs that fired.
        samples: see `by_input`.
    """

    def __init__(
        self, events: Events, weight: Tensor, sparse: bool, samples: tuple[int, int]
    ) -> None:
        inputs, width = weight.shape
        bases, counts, heads, ends, rows = by_input(events, *samples)
        self.touched, slots = None, heads
        if sparse:
            self.touched, slots = _touched(inputs, bases, counts, heads)
            inputs = len(self.touched)
        self.weight = torch.empty(inputs, width)
        advise_huge_pages(self.weight)
        self.bias = np.zeros(width, np.float32)
        self.size = tile_of(width)
        tiles = -(-width // self.size) if events.values is not None else 0
        self.partial = np.empty((tiles, len(events.indices)), np.float32)
        self.results = flat(self.weight), self.bias, self.partial
        self.lists = bases, counts, slots, ends, rows

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
