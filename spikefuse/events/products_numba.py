"""Products with event lists on CPUs, which add rows of weights, one tile of columns at a time.

Weights are `[in, out]`, so that the row of an input is contiguous. A tile of their columns stays in
a core's cache while all rows of events are processed. If there are more threads than tiles, the
threads of a tile split its rows of events, and in backward its inputs. Results do not depend on
the number of threads, except for the order of summation in the gradients of the events' values,
which depends on the tiles. The gradient of the bias is summed in fixed blocks of rows.

Shape legend: R rows of events, E entries, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from spikefuse.events.format import Events
from spikefuse.events.lists import FIRED, EventLists
from spikefuse.events.lists_numba import arrays
from spikefuse.events.transpose_numba import transpose
from spikefuse.kernels.numba_host import (
    advise_huge_pages,
    flat,
    move_to_huge_pages,
    shared,
    threads_for,
)
from spikefuse.kernels.numba_runtime import fence, kernel, load, store, stream
from spikefuse.kernels.vectors_numba import WORD, dots, prefetch, sum_rows

# Most columns of a tile, whose weights have to fit a core's cache.
WIDEST = 512
# Fewest columns if each thread has its own tile, because each row has a fixed cost; columns if
# threads share tiles; and fewest if there are not enough samples to share.
OWN, TOGETHER, NARROWEST = 128, 256, 64
# Rows of weights and of gradients are prefetched this many inputs ahead.
AHEAD = 3
# Rows whose gradients are summed for the bias before these sums are added.
BLOCK = 128
# Values of the gradients of currents, in one tile, that are summed by input at a time: they have to
# stay in a core's cache.
GROUPED = 1 << 18
# From this many bytes, gradients of weights would leave the caches before an optimizer reads them:
# rows that are written once bypass the caches.
STREAMED = 1 << 25


def tile_width(width: int, samples: int) -> int:
    """Return the columns of a tile: one tile per thread, or fewer tiles that threads share."""

    def share(tiles: int) -> int:
        return -(-width // (tiles * WORD)) * WORD

    threads = torch.get_num_threads()
    if share(threads) >= OWN:
        return min(share(threads), WIDEST)
    return min(max(share(-(-threads // max(samples, 1))), NARROWEST), TOGETHER)


def spread(kernel: Any, tiles: int, samples: int, threads: int, work: int, *args: object) -> None:
    """Run `kernel(first, last, *args)` over the samples of all tiles, numbered tile by tile.

    Each thread takes whole tiles if there are enough of them.
    """
    if tiles:
        samples = max(samples, 1)
        unit = samples if threads <= tiles else -(-tiles * samples // threads)
        shared(kernel, tiles * samples, unit, work, *args)


def work_of(events: Events, width: int) -> int:
    """Return the work of a product, in neuron-steps."""
    return width * (events.num_rows + len(events.indices))


def bias_or_zeros(bias: Tensor | None, width: int) -> Tensor:
    return torch.zeros(width, dtype=torch.float32) if bias is None else bias


@kernel
def add_to(target, first, m, grad, at):
    """`target[first + k] += grad[at + k]` for k < m."""
    for k in range(m):
        store(target, first + k, load(target, first + k, 0) + load(grad, at + k, 1), 0)


@kernel
def part_of(first, last, tile, samples):
    """Return the range of a tile's samples among those that `spread` numbers first to last."""
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
    """Return `[R, O]`: the bias plus the rows of `weight [I, O]` of the inputs that fired."""
    width, num_rows = weight.shape[1], events.num_rows
    move_to_huge_pages(weight)
    out = torch.empty(num_rows, width, dtype=torch.float32)
    size, work = tile_width(width, num_rows), work_of(events, width)
    inputs = flat(weight), flat(bias_or_zeros(bias, width)), width, *arrays(events.lists)
    tiles, threads = -(-width // size), threads_for(work)
    spread(_forward, tiles, num_rows, threads, work, size, flat(out), *inputs)
    return out


def list_spikes(spikes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of spikes `[W]`, 0 or 1, and their number, int32 `[1]`."""
    events = Events.from_marks((spikes * FIRED).view(1, 1, -1))
    return events.indices, events.fired


def listed_currents(weight: Tensor, bias: Tensor | None, indices: Tensor, count: Tensor) -> Tensor:
    """Return `[O]`: the bias plus the rows of `weight [I, O]` of the first `count` indices."""
    offsets = torch.zeros(2, dtype=torch.int64)
    offsets[1:] = count
    lists = EventLists(offsets, count, indices)
    return currents(Events.trusted((1, 1, len(weight)), lists), weight, bias)[0]


@kernel
def _backward(
    first, last, size, weight, width, grad, stride, step, rows,
    target, streamed, partial, spikes, entries,
):  # fmt: skip
    edges, bases = spikes[:2]
    ranges = len(edges) - 1
    fresh = np.empty(target.size // width, np.bool_)
    for tile in range(first // ranges, -(-last // ranges)):
        column = tile * size
        m = min(size, width - column)
        begin, end = part_of(first, last, tile, ranges)
        fresh[edges[begin] : edges[end]] = True
        for group in range((len(bases) - 1) // ranges):
            place = tile * step + group * rows * stride
            for k in range(begin, end):
                args = width, column, m, grad, stride, place, group * ranges + k
                add_group(target, streamed, partial, tile, weight, fresh, spikes, entries, *args)
        clear(target, streamed, width, column, m, fresh, edges[begin], edges[end])


@kernel
def add_group(
    target, streamed, partial, tile, weight, fresh, spikes, entries,
    width, column, m, grad, stride, place, group,
):  # fmt: skip
    """Sum the gradients `grad[r, place + k]`, k < m, of one group of samples.

    `target[i, column + k]` adds up those of the rows r in which input i fired; a fresh row of it is
    uninitialized. `partial[tile, e]`, unless it is empty, adds up `weight[i, column + k]
    grad[r, place + k]` over k for every entry e, with its input i and its row r.
    """
    _, bases, starts, inputs, rows, _ = spikes
    zeros, total = np.zeros(m, np.float32), np.empty(m, np.float32)
    for s in range(bases[group], bases[group + 1]):
        i, at = inputs[s], inputs[s] * width + column
        begin, end = np.int64(starts[s]), np.int64(starts[s + 1])
        # Rows are too far apart for the hardware prefetcher.
        if s + AHEAD < bases[group + 1] and not streamed:
            prefetch(target, inputs[s + AHEAD] * width + column, m)
        if streamed:
            sum_rows(total, 0, zeros, 0, grad, stride, place, m, rows, begin, end)
            stream(target, at, total, m)
        elif fresh[i]:
            sum_rows(target, at, zeros, 0, grad, stride, place, m, rows, begin, end)
        else:
            sum_rows(target, at, target, at, grad, stride, place, m, rows, begin, end)
        fresh[i] = False
    if partial.size:
        out = partial[tile]
        _, bases, starts, inputs, rows, numbers = entries
        for s in range(bases[group], bases[group + 1]):
            at = inputs[s] * width + column
            begin, end = np.int64(starts[s]), np.int64(starts[s + 1])
            if s + AHEAD < bases[group + 1]:
                prefetch(weight, inputs[s + AHEAD] * width + column, m)
            dots(out, weight, at, m, grad, stride, place, rows, numbers, begin, end)


@kernel
def clear(target, streamed, width, column, m, fresh, first, last):
    """`target[i, column + k] = 0` for the inputs from first to last that are still fresh. Makes all
    streamed rows visible."""
    zeros = np.zeros(m, np.float32)
    for i in range(first, last):
        if fresh[i]:
            at = i * width + column
            if streamed:
                stream(target, at, zeros, m)
            else:
                target[at : at + m] = np.float32(0.0)
    if streamed:
        fence()


@kernel
def _add_rows(first, last, size, sums, grad, width):
    num_rows = grad.size // width
    for block in range(first, last):
        for r in range(block * size, min((block + 1) * size, num_rows)):
            add_to(sums, block * width, width, grad, r * width)


def gradients(events: Events, grad: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the results of `Gradients.finished` for the gradient `[R, O]` of `currents`."""
    num_rows, width = events.num_rows, weight.shape[1]
    size, blocks, rows = tile_width(width, num_rows), -(-num_rows // BLOCK), flat(grad.contiguous())
    work = Gradients(events, weight, (1, num_rows), size)
    sums = np.zeros((blocks, width), np.float32)
    shared(_add_rows, blocks, 1, grad.numel(), BLOCK, sums.reshape(-1), rows, width)
    work.add(rows, width, size)
    return work.finished(sums)


class Gradients:
    """Buffers for the gradients of a product with events.

    Args:
        events: inputs of the product.
        weight: `[I, O]`.
        samples: (num_steps, batch); see `transpose`.
        size: columns of a tile.
    """

    def __init__(self, events: Events, weight: Tensor, samples: tuple[int, int], size: int) -> None:
        (num_steps, batch), (inputs, width) = samples, weight.shape
        self.tiles, threads = -(-width // size), threads_for(work_of(events, width))
        # Threads that share tiles split the inputs. That costs more in total: with hardly more
        # threads than tiles, it is faster to leave some threads idle.
        self.ranges = threads if 3 * threads > 4 * self.tiles else 1
        self.group = max(1, min(batch, GROUPED // max(num_steps * size, 1)))
        grouping = samples, self.group, self.ranges
        self.spikes = transpose(events, *grouping)
        needs_values = events.values is not None
        # Kernels need arrays of the same types even if they do not read them.
        self.entries = transpose(events, *grouping, near=True) if needs_values else self.spikes
        self.events, self.source, self.size = events, weight, size
        self.rows = self.group * num_steps
        self.weight = torch.empty(inputs, width, dtype=torch.float32)
        advise_huge_pages(self.weight)
        self.streamed = self.group >= batch and self.weight.nbytes >= STREAMED
        tiles = self.tiles if needs_values else 0
        self.partial = np.empty((tiles, len(events.indices)), np.float32)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments of kernels that sum by input."""
        lists = tuple(self.spikes), tuple(self.entries)
        return flat(self.weight), self.streamed, self.partial, *lists

    def add(self, grad: np.ndarray, stride: int, step: int) -> None:
        """Sum the gradients of currents by input.

        Row r of a tile begins at `grad[tile * step + r * stride]`.
        """
        width = self.weight.shape[1]
        rows = flat(self.source), width, grad, stride, step, self.rows
        work = work_of(self.events, width)
        sizes = self.tiles, self.ranges, self.ranges
        spread(_backward, *sizes, work, self.size, *rows, *self.arguments)

    def finished(self, sums: np.ndarray) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the gradients.

        Args:
            sums: `[..., O]`, which add up to the gradient of the bias.

        Returns:
            Gradients of the weights `[I, O]`, the bias `[O]`, and the events' values `[E]` or None.
        """
        values = None if self.events.values is None else torch.from_numpy(_total(self.partial))
        return self.weight, torch.from_numpy(_total(sums)), values


@kernel
def _total(rows):
    """Sum rows in their order; the order in NumPy's sum depends on their width."""
    total = np.zeros(rows.shape[1], np.float32)
    for r in range(len(rows)):
        for k in range(len(total)):
            total[k] += rows[r, k]
    return total
