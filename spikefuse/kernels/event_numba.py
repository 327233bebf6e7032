"""Products with event lists on CPUs: whole rows of weights are added, a tile of columns at a time.

Weights are `[in, out]`, so that the row of an input is contiguous. A tile of their columns stays in
a core's cache while all rows of events go by; each thread has tiles of its own. Only the gradients
of the events' values are summed in another order where there are other tiles.

Shape legend: R rows of events, E entries, I inputs, O outputs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from spikefuse.compiler.numba_runtime import (
    advise_huge_pages,
    flat,
    kernel,
    load,
    move_to_huge_pages,
    store,
)
from spikefuse.compiler.numba_threads import shared
from spikefuse.kernels.event_lists_numba import lists
from spikefuse.kernels.event_vectors import WORD, dots, prefetch, sum_rows
from spikefuse.kernels.events import Events
from spikefuse.neurons.candidates import FIRED

# Columns of a tile: at most so many that its weights fit a core's cache, at least so many that
# adding a row is worth it; whole words of bits.
WIDEST, NARROWEST = 512, 64
# Rows of weights or their gradients are asked for so many inputs before they are used.
AHEAD = 3


def tile_of(width: int) -> int:
    """Columns of a tile: fewer where there are more threads than wide tiles."""
    share = -(-width // (torch.get_num_threads() * WORD)) * WORD
    return min(max(share, NARROWEST), WIDEST)


@kernel
def add_to(target, first, m, grad, at):
    """`target[first + k] += grad[at + k]`."""
    for k in range(m):
        store(target, first + k, load(target, first + k, 0) + load(grad, at + k, 1), 0)


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
    out = torch.empty(events.num_rows, width, dtype=torch.float32)
    size = tile_of(width)
    arguments = size, flat(out), flat(weight), flat(given(bias, width)), width, *lists(events)
    work = out.numel() + width * len(events.indices)
    shared(_forward, width, size, work, *arguments)
    return out


def row_listed(spikes: Tensor) -> tuple[Tensor, Tensor]:
    """(indices, their number int32 `[1]`) of spikes `[W]`, 0 or 1."""
    events = Events.from_marks((spikes * FIRED).view(1, 1, -1))
    return events.indices, events.fired


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
    width = weight.shape[1]
    size = tile_of(width)
    work = Gradients(events, weight, sparse, (events.num_rows, 1), 1, size)
    arguments = size, flat(grad.contiguous()), *work.results, flat(weight), width
    lists = events.num_rows, work.spikes, work.entries
    shared(_backward, width, size, grad.numel(), *arguments, *lists)
    return work.finished()


class Gradients:
    """Room for the gradients of a product with events.

    Args:
        events: its inputs.
        weight: `[I, O]`.
        sparse: the weights' gradient has only the rows of inputs that fired.
        samples, group: see `by_input`.
        size: columns of a tile.
    """

    def __init__(
        self,
        events: Events,
        weight: Tensor,
        sparse: bool,
        samples: tuple[int, int],
        group: int,
        size: int,
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
        self.weight = torch.empty(inputs, width, dtype=torch.float32)
        advise_huge_pages(self.weight)
        self.bias = np.zeros(width, np.float32)
        tiles = -(-width // size) if wanted else 0
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
    return torch.zeros(width, dtype=torch.float32) if bias is None else bias
