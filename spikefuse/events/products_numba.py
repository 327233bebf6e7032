"""Products with event lists on CPUs: whole rows of weights are added, a tile of columns at a time.

Weights are `[in, out]`, so that the row of an input is contiguous. A tile of their columns stays in
a core's cache while all rows of events go by. Where there are more threads than tiles, those of one
tile share out its rows of events, and for the weights' gradient its inputs. Only the gradients of
the events' values are summed in another order where there are other tiles; the bias's are summed by
blocks of rows that no number of threads changes.

Shape legend: R rows of events, E entries, I inputs, O outputs, G groups of samples, P parts of
the inputs, S inputs that fired, of each group.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from spikefuse.events.candidates import FIRED
from spikefuse.events.format import Events
from spikefuse.events.lists_numba import lists
from spikefuse.events.vectors_numba import WORD, dots, prefetch, sum_rows
from spikefuse.kernels.numba_runtime import (
    advise_huge_pages,
    fence,
    flat,
    kernel,
    load,
    move_to_huge_pages,
    store,
    stream,
)
from spikefuse.kernels.numba_threads import shared, threads_for

# Columns of a tile: at most so many that its weights fit a core's cache; whole words of bits.
WIDEST = 512
# At least so many if a thread has a tile to itself, as much time goes into each row of fewer; so
# many where threads share a tile; fewer only where there are not enough samples to share out.
OWN, TOGETHER, NARROWEST = 128, 256, 64
# Rows of weights or their gradients are asked for so many inputs before they are used.
AHEAD = 3
# Rows of a product whose gradients are summed for the bias, before these sums are.
BLOCK = 128
# Gradients of currents, of a tile and so many samples as fit, that are summed by input at a time:
# they stay in a core's cache.
GROUPED = 1 << 18
# Gradients of weights of so many bytes leave the caches before an optimizer reads them: rows that
# are written once are written past the caches, which would else read them first.
STREAMED = 1 << 25
# An entry is read and written here and there: so many neuron-steps of work.
ENTRY = 2


def tile_of(width: int, samples: int) -> int:
    """Columns of a tile: as many tiles as threads, or fewer that threads share."""

    def share(tiles: int) -> int:
        return -(-width // (tiles * WORD)) * WORD

    threads = torch.get_num_threads()
    if share(threads) >= OWN:
        return min(share(threads), WIDEST)
    return min(max(share(-(-threads // max(samples, 1))), NARROWEST), TOGETHER)


def spread(kernel: Any, tiles: int, samples: int, threads: int, work: int, *args: object) -> None:
    """Run `kernel(first, last, *args)` over the samples of all tiles, numbered tile by tile; over
    whole tiles where there is one for each of so many threads."""
    if tiles:
        samples = max(samples, 1)
        unit = samples if threads <= tiles else -(-tiles * samples // threads)
        shared(kernel, tiles * samples, unit, work, *args)


@kernel
def add_to(target, first, m, grad, at):
    """`target[first + k] += grad[at + k]`."""
    for k in range(m):
        store(target, first + k, load(target, first + k, 0) + load(grad, at + k, 1), 0)


@kernel
def part_of(first, last, tile, samples):
    """(begin, end): which samples of a tile are among those that `spread` numbers first to last."""
    before = tile * samples
    return max(first - before, 0), min(last - before, samples)


@kernel
def _forward(first, last, size, out, weight, bias, width, offsets, fired, indices):
    num_rows = max(len(fired), 1)
    for tile in range(first // num_rows, -(-last // num_rows)):
        column = tile * size
        m = min(size, width - column)
        begin, end = part_of(first, last, tile, num_rows)
        for r in range(begin, min(end, len(fired))):
            e = offsets[r]
            at = r * width + column
            sum_rows(out, at, bias, column, weight, width, column, m, indices, e, e + fired[r])


def currents(events: Events, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`[R, O]`: for each row the bias and the rows of `weight [I, O]` of the inputs that fired."""
    width = weight.shape[1]
    move_to_huge_pages(weight)
    out = torch.empty(events.num_rows, width, dtype=torch.float32)
    size, work = tile_of(width, events.num_rows), work_of(events, width)
    arguments = size, flat(out), flat(weight), flat(given(bias, width)), width, *lists(events)
    sizes = -(-width // size), events.num_rows
    spread(_forward, *sizes, threads_for(work), work, *arguments)
    return out


def work_of(events: Events, width: int) -> int:
    """Of a product, in neuron-steps."""
    return width * (events.num_rows + len(events.indices))


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
    first, last, size, weight, width, grad, stride, step, rows,
    target, streamed, partial, spikes, entries,
):  # fmt: skip
    edges, bases = spikes[:2]
    parts = len(edges) - 1
    fresh = np.empty(target.size // width, np.bool_)
    for tile in range(first // parts, -(-last // parts)):
        column = tile * size
        m = min(size, width - column)
        begin, end = part_of(first, last, tile, parts)
        fresh[edges[begin] : edges[end]] = True
        for group in range((len(bases) - 1) // parts):
            place = tile * step + group * rows * stride
            for part in range(begin, end):
                args = width, column, m, grad, stride, place, group * parts + part
                add_group(target, streamed, partial, tile, weight, fresh, spikes, entries, *args)
        clear(target, streamed, width, column, m, fresh, edges[begin], edges[end])


@kernel
def add_group(
    target, streamed, partial, tile, weight, fresh, spikes, entries,
    width, column, m, grad, stride, place, group,
):  # fmt: skip
    """Both of what follows, for a tile; the second where it is wanted."""
    add_by_input(target, streamed, width, column, m, fresh, grad, stride, place, group, spikes)
    if partial.size:
        out = partial[tile]
        dots_by_input(out, weight, width, column, m, grad, stride, place, group, entries)


@kernel
def add_by_input(
    target, streamed, width, column, m, fresh, grad, stride, place, group, by_input
):  # fmt: skip
    """`target[slot, column + k] += sum of grad[r, place + k]` for every input of a group that
    fired, over the rows r in which it did. A fresh slot holds nothing yet."""
    _, bases, starts, slots, rows, _ = by_input
    zeros, total = np.zeros(m, np.float32), np.empty(m, np.float32)
    for s in range(bases[group], bases[group + 1]):
        at = slots[s] * width + column
        begin, end = np.int64(starts[s]), np.int64(starts[s + 1])
        if s + AHEAD < bases[group + 1] and not streamed:
            prefetch(target, slots[s + AHEAD] * width + column, m)
        if streamed:
            fresh[slots[s]] = False
            sum_rows(total, 0, zeros, 0, grad, stride, place, m, rows, begin, end)
            stream(target, at, total, m)
        elif fresh[slots[s]]:
            fresh[slots[s]] = False
            sum_rows(target, at, zeros, 0, grad, stride, place, m, rows, begin, end)
        else:
            sum_rows(target, at, target, at, grad, stride, place, m, rows, begin, end)


@kernel
def dots_by_input(out, weight, width, column, m, grad, stride, place, group, by_input):
    """`out[e] = sum over k of weight[i, column + k] grad[r, place + k]` for every entry e of a
    group, i its input and r its row."""
    _, bases, starts, inputs, rows, entries = by_input
    for s in range(bases[group], bases[group + 1]):
        at, begin, end = inputs[s] * width + column, np.int64(starts[s]), np.int64(starts[s + 1])
        # Rows lie too far apart for the processor to see the next one coming.
        if s + AHEAD < bases[group + 1]:
            prefetch(weight, inputs[s + AHEAD] * width + column, m)
        dots(out, weight, at, m, grad, stride, place, rows, entries, begin, end)


@kernel
def clear(target, streamed, width, column, m, fresh, first, last):
    """`target[slot, column + k] = 0` from slot first to last where nothing has been added; all that
    was streamed is there then."""
    zeros = np.zeros(m, np.float32)
    for slot in range(first, last):
        if fresh[slot]:
            at = slot * width + column
            if streamed:
                stream(target, at, zeros, m)
            else:
                target[at : at + m] = np.float32(0.0)
    if streamed:
        fence()


@kernel
def _count_inputs(first, last, T, B, cuts, offsets, stops, indices, found):
    for k in range(first, last):
        mine = found[k]
        for b in range(cuts[k], cuts[k + 1]):
            for t in range(T):
                for e in range(offsets[t * B + b], stops[t * B + b]):
                    mine[indices[e]] += 1


@kernel
def _lay_out(counts, edges, bases, starts, heads):
    """Where the spikes of each input begin: fills the rest, makes first places of the counts
    `[G, ranges, I]`, and returns how many heads there are."""
    s = at = 0
    for group in range(len(counts)):
        for part in range(len(edges) - 1):
            bases[group * (len(edges) - 1) + part] = s
            for i in range(edges[part], edges[part + 1]):
                begin = at
                for k in range(counts.shape[1]):
                    count = counts[group, k, i]
                    counts[group, k, i] = at
                    at += count
                if at > begin:
                    starts[s], heads[s] = begin, i
                    s += 1
    bases[-1], starts[s] = s, at
    return s


@kernel
def _sort(first, last, T, B, cuts, offsets, stops, indices, places, size, rows, entries):
    for k in range(first, last):
        mine = places[k]
        for b in range(cuts[k], cuts[k + 1]):
            for t in range(T):
                row = b % size * T + t
                for e in range(offsets[t * B + b], stops[t * B + b]):
                    place = mine[indices[e]]
                    rows[place], entries[place] = row, e
                    mine[indices[e]] = place + 1


def by_input(
    events: Events, num_steps: int, batch: int, size: int, parts: int, silent: bool = False
) -> tuple[np.ndarray, ...]:
    """The spikes of each group of samples in the order of their inputs.

    Args:
        num_steps, batch: of the events, or (1, R), which makes a sample of each row.
        size: samples of a group; the last may have fewer.
        parts: of the inputs, with about as many spikes each.
        silent: the other candidates too.

    Returns:
        (edges `[P + 1]`, bases `[G P + 1]`, starts `[S + 1]`, heads `[S]`, rows, entries): part p
        has the inputs from `edges[p]` to `edges[p + 1]`. Of these, `heads[s]` fired in a group for
        s from `bases[group P + p]` on, to the next base. Those of s are the places from `starts[s]`
        to `starts[s + 1]`: at each place an entry and its row in the group, b T + t with b counted
        from the group's first sample, in the order of these.
    """
    offsets, fired, indices = lists(events)
    stops = offsets[1:] if silent else offsets[:-1] + fired
    total, inputs = int(offsets[-1]) if silent else int(fired.sum()), events.shape[2]
    groups, work = max(1, -(-batch // size)), ENTRY * total
    if total >= 1 << 31:
        raise ValueError(
            f"a layer's input lists {total:,} events: of a batch at most {(1 << 31) - 1:,} can be "
            "sorted; use smaller batches"
        )
    # Several ranges of a group's samples are sorted at a time, one behind another at each input.
    ranges = min(-(-threads_for(work) // groups), size)
    within = np.arange(groups)[:, None] * size + np.arange(ranges) * size // ranges
    cuts = np.minimum(np.append(within, batch), batch)
    found, items = np.zeros((groups, ranges, inputs), np.int32), groups * ranges
    of_range = found.reshape(items, inputs)
    args = num_steps, batch, cuts, offsets, stops, indices, of_range
    shared(_count_inputs, items, 1, work, *args)
    edges = np.array([0, inputs])
    if parts > 1:
        whole = np.cumsum(of_range.sum(0))
        inner = np.searchsorted(whole, np.arange(1, parts) * total // parts)
        edges = np.concatenate(([0], inner, [inputs]))
    bases, most = np.empty(groups * parts + 1, np.int64), min(total, groups * inputs)
    starts, heads = np.empty(most + 1, np.int32), np.empty(most, np.int32)
    number = _lay_out(found, edges, bases, starts, heads)
    rows, entries = np.empty(total, np.int32), np.empty(total, np.int32)
    shared(_sort, items, 1, work, *args, size, rows, entries)
    return edges, bases, starts[: number + 1], heads[:number], rows, entries


@kernel
def _add_rows(first, last, size, sums, grad, width):
    num_rows = grad.size // width
    for block in range(first, last):
        for r in range(block * size, min((block + 1) * size, num_rows)):
            add_to(sums, block * width, width, grad, r * width)


def gradients(
    events: Events, grad: Tensor, weight: Tensor, sparse: bool
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
    """What `Gradients.finished` gives, from the gradient `[R, O]` of `currents`."""
    num_rows, width = events.num_rows, weight.shape[1]
    size, blocks, rows = tile_of(width, num_rows), -(-num_rows // BLOCK), flat(grad.contiguous())
    work = Gradients(events, weight, sparse, (1, num_rows), size)
    sums = np.zeros((blocks, width), np.float32)
    shared(_add_rows, blocks, 1, grad.numel(), BLOCK, sums.reshape(-1), rows, width)
    work.add(rows, width, size)
    return work.finished(sums)


class Gradients:
    """Room for the gradients of a product with events.

    Args:
        events: its inputs.
        weight: `[I, O]`.
        sparse: the weights' gradient has only the rows of inputs that fired.
        samples: (num_steps, batch) of `by_input`.
        size: columns of a tile.
    """

    def __init__(
        self,
        events: Events,
        weight: Tensor,
        sparse: bool,
        samples: tuple[int, int],
        size: int,
    ) -> None:
        (num_steps, batch), (inputs, width) = samples, weight.shape
        self.tiles, threads = -(-width // size), threads_for(work_of(events, width))
        # Of the inputs, for threads that share tiles. That takes longer in all, so that of hardly
        # more threads than tiles it is quicker to leave some without work.
        self.parts = threads if 3 * threads > 4 * self.tiles else 1
        self.group = max(1, min(batch, GROUPED // max(num_steps * size, 1)))
        order = *samples, self.group, self.parts
        self.spikes = by_input(events, *order)
        wanted = events.values is not None
        # Something of the same kind where it is not wanted.
        self.entries = by_input(events, *order, silent=True) if wanted else self.spikes
        self.touched = None
        if sparse:
            self.touched, self.spikes = _touched(inputs, self.spikes)
            inputs = len(self.touched)
        self.events, self.source, self.size = events, weight, size
        self.rows = self.group * num_steps
        self.weight = torch.empty(inputs, width, dtype=torch.float32)
        advise_huge_pages(self.weight)
        is_written_once = self.group >= batch
        self.streamed = is_written_once and self.weight.nbytes >= STREAMED
        self.partial = np.empty((self.tiles if wanted else 0, len(events.indices)), np.float32)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What kernels take that sum by input."""
        return flat(self.weight), self.streamed, self.partial, self.spikes, self.entries

    def add(self, grad: np.ndarray, stride: int, step: int) -> None:
        """Sum the gradients of currents by input; row r of a tile's begins at
        `tile * step + r * stride`."""
        width = self.weight.shape[1]
        rows = flat(self.source), width, grad, stride, step, self.rows
        work = work_of(self.events, width)
        sizes = self.tiles, self.parts, self.parts
        spread(_backward, *sizes, work, self.size, *rows, *self.arguments)

    def finished(self, sums: np.ndarray) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
        """(the rows int64 `[K]` that the weights' gradient has, or None for all; that gradient
        `[K, O]`; that of the bias `[O]`; that of the events' values `[E]` if they have any).

        Args:
            sums: `[..., O]`, which add up to the bias's.
        """
        wanted = self.events.values is not None
        values = torch.from_numpy(_total(self.partial)) if wanted else None
        rows = None if self.touched is None else torch.from_numpy(self.touched)
        return rows, self.weight, torch.from_numpy(_total(sums)), values


@kernel
def _total(rows):
    """The sum of rows, one after the other: NumPy's order depends on their width."""
    total = np.zeros(rows.shape[1], np.float32)
    for r in range(len(rows)):
        for k in range(len(total)):
            total[k] += rows[r, k]
    return total


def _touched(
    inputs: int, found: tuple[np.ndarray, ...]
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """The inputs that fired, int64, and what `by_input` found with their places among them."""
    edges, bases, starts, heads, *others = found
    seen = np.zeros(inputs, bool)
    seen[heads] = True
    touched = np.flatnonzero(seen)
    places = np.cumsum(seen, dtype=np.int32) - np.int32(1)
    return touched, (np.searchsorted(touched, edges), bases, starts, places[heads], *others)


def given(bias: Tensor | None, width: int) -> Tensor:
    return torch.zeros(width, dtype=torch.float32) if bias is None else bias
