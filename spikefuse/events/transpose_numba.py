"""Transpose event lists on CPUs: from the inputs of each row to the entries of each input.

Shape legend: E entries, I inputs, G groups of samples, P ranges of inputs, C chunks of a group,
S pairs of a group and an input with entries in it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from spikefuse.events.format import Events
from spikefuse.events.lists_numba import arrays
from spikefuse.kernels.numba_host import shared, threads_for
from spikefuse.kernels.numba_runtime import kernel

# Work per entry, which is read and written at scattered places, in neuron-steps.
ENTRY = 2


class InputLists(NamedTuple):
    """The entries of every group of samples, sorted by input.

    Range p has the inputs from `edges[p]` to `edges[p + 1]`. In group g, those with entries are
    `inputs[s]` for s from `bases[g P + p]` to the next base. The entries of s are at the places
    from `starts[s]` to `starts[s + 1]`, ordered by `rows`.

    Attributes:
        edges: `[P + 1]`.
        bases: int64 `[G P + 1]`.
        starts: int32 `[S + 1]`.
        inputs: int32 `[S]`.
        rows: int32, for each place the row in its group, b T + t, b from the group's first sample.
        entries: int32, for each place the entry in the event list.
    """

    edges: np.ndarray
    bases: np.ndarray
    starts: np.ndarray
    inputs: np.ndarray
    rows: np.ndarray
    entries: np.ndarray


@kernel
def _count_inputs(first, last, T, B, cuts, offsets, stops, indices, counts):
    for k in range(first, last):
        own = counts[k]
        for b in range(cuts[k], cuts[k + 1]):
            for t in range(T):
                for e in range(offsets[t * B + b], stops[t * B + b]):
                    own[indices[e]] += 1


@kernel
def _lay_out(counts, edges, bases, starts, inputs):
    """Fill the other arrays from counts `[G, C, I]`, replace these by first places, return S."""
    s = at = 0
    for group in range(len(counts)):
        for p in range(len(edges) - 1):
            bases[group * (len(edges) - 1) + p] = s
            for i in range(edges[p], edges[p + 1]):
                begin = at
                for k in range(counts.shape[1]):
                    count = counts[group, k, i]
                    counts[group, k, i] = at
                    at += count
                if at > begin:
                    starts[s], inputs[s] = begin, i
                    s += 1
    bases[-1], starts[s] = s, at
    return s


@kernel
def _sort(first, last, T, B, cuts, offsets, stops, indices, places, size, rows, entries):
    for k in range(first, last):
        own = places[k]
        for b in range(cuts[k], cuts[k + 1]):
            for t in range(T):
                row = b % size * T + t
                for e in range(offsets[t * B + b], stops[t * B + b]):
                    place = own[indices[e]]
                    rows[place], entries[place] = row, e
                    own[indices[e]] = place + 1


def transpose(
    events: Events, samples: tuple[int, int], size: int, ranges: int, near: bool = False
) -> InputLists:
    """Sort the spikes of each group of samples by input.

    Args:
        samples: (T, B) of the events; (1, R) makes each row a separate sample.
        size: samples of a group; the last group may have fewer.
        ranges: number of ranges of inputs, with about as many entries each.
        near: include the candidates that did not fire.

    Raises:
        ValueError: there are 2^31 entries or more.
    """
    num_steps, batch = samples
    offsets, fired, indices = arrays(events.lists)
    stops = offsets[1:] if near else offsets[:-1] + fired
    total, num_inputs = int(offsets[-1]) if near else int(fired.sum()), events.shape[2]
    groups, work = max(1, -(-batch // size)), ENTRY * total
    if total >= 1 << 31:
        raise ValueError(
            f"the input of a layer lists {total:,} events: expected at most {(1 << 31) - 1:,} in a "
            "batch; use smaller batches"
        )
    # Threads sort chunks of a group, which follow each other at every input.
    chunks = min(-(-threads_for(work) // groups), size)
    within = np.arange(groups)[:, None] * size + np.arange(chunks) * size // chunks
    cuts = np.minimum(np.append(within, batch), batch)
    counts, items = np.zeros((groups, chunks, num_inputs), np.int32), groups * chunks
    by_chunk = counts.reshape(items, num_inputs)
    arguments = num_steps, batch, cuts, offsets, stops, indices, by_chunk
    shared(_count_inputs, items, 1, work, *arguments)
    edges = np.array([0, num_inputs])
    if ranges > 1:
        cumulative = np.cumsum(by_chunk.sum(0))
        inner = np.searchsorted(cumulative, np.arange(1, ranges) * total // ranges)
        edges = np.concatenate(([0], inner, [num_inputs]))
    bases, most = np.empty(groups * ranges + 1, np.int64), min(total, groups * num_inputs)
    starts, inputs = np.empty(most + 1, np.int32), np.empty(most, np.int32)
    number = _lay_out(counts, edges, bases, starts, inputs)
    rows, entries = np.empty(total, np.int32), np.empty(total, np.int32)
    shared(_sort, items, 1, work, *arguments, size, rows, entries)
    return InputLists(edges, bases, starts[: number + 1], inputs[:number], rows, entries)
