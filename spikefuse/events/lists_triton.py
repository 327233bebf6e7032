"""Lists of events on GPUs: made, read and put together. Of all kernels a program has one row.

None waits for the GPU: whoever makes a list has to find out how long it is.

Shape legend: R rows of events, E entries, W sites of a row, K ranks.
"""

from __future__ import annotations

import contextlib
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from spikefuse.events.format import Counts, Events
from spikefuse.kernels.triton_runtime import Launch

# Columns of a program; one warp reads 128 of them in one 16-byte access a thread.
WIDEST = 512
# Entries that a program has in hand, and its warps.
ENTRIES, WARPS = 256, 2


@triton.jit
def count(marks, fired, entries, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The spikes of each row, whose mark is 2, and these and the other candidates, 1."""
    row = tl.program_id(0).to(tl.int64)
    spikes = tl.zeros([BLOCK], tl.int32)
    either = tl.zeros([BLOCK], tl.int32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        mark = tl.load(marks + row * width + column, mask=column < width, other=0.0)
        spikes += (mark > 1.5).to(tl.int32)
        either += (mark > 0.5).to(tl.int32)
    tl.store(fired + row, tl.sum(spikes, 0))
    tl.store(entries + row, tl.sum(either, 0))


@triton.jit
def fill(  # type: ignore[no-untyped-def]
    marks, offsets, fired, indices, width, BLOCK: tl.constexpr
):
    """Write the sites of each row to its part of `indices`, spikes first."""
    row = tl.program_id(0).to(tl.int64)
    spikes = tl.load(offsets + row)
    others = spikes + tl.load(fired + row)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        mark = tl.load(marks + row * width + column, mask=column < width, other=0.0)
        spike = (mark > 1.5).to(tl.int32)
        other = ((mark > 0.5) & (mark < 1.5)).to(tl.int32)
        tl.store(indices + spikes + tl.cumsum(spike, 0) - 1, column, mask=spike > 0)
        tl.store(indices + others + tl.cumsum(other, 0) - 1, column, mask=other > 0)
        spikes += tl.sum(spike, 0)
        others += tl.sum(other, 0)


@triton.jit(do_not_specialize=["none"])
def describe(  # type: ignore[no-untyped-def]
    rows, values, inputs, offsets, fired, indices, none, BLOCK: tl.constexpr
):
    """Of each entry, as far as asked for: its row, 1 if it fired and else 0, and its site if it
    fired and else `none`."""
    row = tl.program_id(0)
    begin = tl.load(offsets + row)
    end, silent = tl.load(offsets + row + 1), begin + tl.load(fired + row)
    for first in range(begin, end, BLOCK):
        e = first + tl.arange(0, BLOCK)
        live = e < end
        if rows is not None:
            tl.store(rows + e, tl.zeros([BLOCK], tl.int32) + row, mask=live)
        if values is not None:
            tl.store(values + e, (e < silent).to(tl.float32), mask=live)
        if inputs is not None:
            site = tl.load(indices + e, mask=live, other=0)
            tl.store(inputs + e, tl.where(e < silent, site, none), mask=live)


@triton.jit(do_not_specialize=["width"])
def scatter(  # type: ignore[no-untyped-def]
    out, values, offsets, fired, indices, width, BLOCK: tl.constexpr
):
    """out[row, indices[e]] = values[e] for the entries of each row; without values 1 for its
    spikes."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets + row)
    if values is None:
        end = begin + tl.load(fired + row)
    else:
        end = tl.load(offsets + row + 1)
    for first in range(begin, end, BLOCK):
        e = first + tl.arange(0, BLOCK)
        live = e < end
        site = tl.load(indices + e, mask=live, other=0)
        if values is None:
            value = tl.full([BLOCK], 1.0, tl.float32)
        else:
            value = tl.load(values + e, mask=live, other=0.0)
        tl.store(out + row * width + site, value.to(out.dtype.element_ty), mask=live)


@triton.jit
def place(places, before, offsets, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write which entries stay where each row keeps its first ones only."""
    row = tl.program_id(0)
    begin, at = tl.load(before + row), tl.load(offsets + row)
    number = tl.load(offsets + row + 1) - at
    for first in range(0, number, BLOCK):
        e = first + tl.arange(0, BLOCK)
        tl.store(places + at + e, begin + e, mask=e < number)


@triton.jit(do_not_specialize=["ranks", "rows", "rank"])
def merge(  # type: ignore[no-untyped-def]
    whole,
    values,
    mine,
    indices,
    firsts,
    counts,
    starts,
    offsets,
    fired,
    ranks,
    rows,
    rank,
    BLOCK: tl.constexpr,
):
    """Write all ranks' spikes of each row to `whole`, then their other candidates, with their
    values, and for one rank's own entries the places in `whole`."""
    row = tl.program_id(0).to(tl.int64)
    # Not given: each number would be prepared for as another launch.
    most = tl.cast(1, tl.int64)
    for k in range(0, ranks):
        most = tl.maximum(most, tl.load(starts + k * (rows + 1) + rows))
    spikes = tl.load(offsets + row)
    others = spikes + tl.load(fired + row)
    for k in range(0, ranks):
        begin = tl.load(starts + k * (rows + 1) + row)
        number = tl.load(starts + k * (rows + 1) + row + 1) - begin
        its_spikes = tl.load(counts + 2 * k * rows + row)
        source, lowest = indices + k * most + begin, tl.load(firsts + k).to(tl.int32)
        for first in range(0, number, BLOCK):
            e = first + tl.arange(0, BLOCK)
            live, is_spike = e < number, e < its_spikes
            to = tl.where(is_spike, spikes + e, others + e - its_spikes)
            tl.store(whole + to, tl.load(source + e, mask=live, other=0) + lowest, mask=live)
            tl.store(values + to, is_spike.to(tl.float32), mask=live)
            if k == rank:
                tl.store(mine + begin + e, to, mask=live)
        spikes += its_spikes
        others += number - its_spikes


class Marked:
    """See `events.marked`."""

    def __init__(self, marks: Tensor) -> None:
        self.marks = marks.contiguous()
        self.fired, self.entries = torch.empty(
            2, len(marks), dtype=torch.int32, device=marks.device
        )
        self._launch(count, self.fired, self.entries)

    def sites(self, offsets: Tensor, room: int) -> Tensor:
        indices = torch.empty(room, dtype=torch.int32, device=offsets.device)
        if room:
            self._launch(fill, offsets, self.fired, indices)
        return indices

    def _launch(self, kernel: Any, *others: Tensor) -> None:
        rows, width = self.marks.shape
        block, warps = block_of(width)
        if rows:
            device = self.marks.device
            launch_of(kernel, (rows, 1, 1), (width, block), warps, device)((self.marks, *others))


marked = Marked


def rows(events: Events) -> Tensor:
    """See `Events.rows`."""
    found = torch.empty(len(events.indices), dtype=torch.int64, device=events.device)
    _describe(events, (found, None, None))
    return found


def values(events: Events) -> Tensor:
    """See `Events.is_fired`."""
    found = torch.empty(len(events.indices), dtype=torch.float32, device=events.device)
    _describe(events, (None, found, None))
    return found


def described(events: Events, none: int) -> tuple[Tensor, Tensor]:
    """int32 `[E]` each: the rows of the entries, and their sites if they fired, `none` if not."""
    found, inputs = torch.empty_like(events.indices), torch.empty_like(events.indices)
    _describe(events, (found, None, inputs), none)
    return found, inputs


def _describe(events: Events, results: tuple[Tensor | None, ...], none: int = 0) -> None:
    if len(events.indices):
        lists = events.offsets, events.fired, events.indices
        grid, dtypes = (
            (events.num_rows, 1, 1),
            tuple(None if x is None else x.dtype for x in results),
        )
        launch = launch_of(describe, grid, (none, ENTRIES), WARPS, events.device, dtypes)
        launch((*results, *lists))


def dense(events: Events, values: Tensor | None, dtype: torch.dtype) -> Tensor:
    """See `event_lists_numba.dense`."""
    width = events.shape[2]
    out = torch.zeros(events.num_rows, width, dtype=dtype, device=events.device)
    if len(events.indices):
        values = None if values is None else values.contiguous()
        lists = events.offsets, events.fired, events.indices
        grid, dtypes = (len(out), 1, 1), (dtype, None if values is None else values.dtype)
        launch = launch_of(scatter, grid, (width, ENTRIES), WARPS, events.device, dtypes)
        launch((out, values, *lists))
    return out


def places(events: Events, offsets: Tensor, number: int) -> Tensor:
    """See `event_lists_numba.places`."""
    found = torch.empty(number, dtype=torch.int64, device=events.device)
    if number:
        with on(events.device):
            place[(events.num_rows,)](
                *(found, events.offsets, offsets), BLOCK=ENTRIES, num_warps=WARPS
            )
    return found


def merged(
    indices: Tensor, first: Tensor, counts: Counts, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `event_lists_numba.merged`."""
    device, total = indices.device, sum(counts.sizes)
    whole = torch.empty(total, dtype=torch.int32, device=device)
    values = torch.empty(total, dtype=torch.float32, device=device)
    mine = torch.empty(counts.sizes[rank], dtype=torch.int64, device=device)
    if total:
        integers = *counts.rows.shape[::2], rank, ENTRIES
        launch = launch_of(merge, (len(counts.fired), 1, 1), integers, WARPS, device)
        launch((whole, values, mine, indices, first, *counts[:4]))
    return whole, values, mine


@lru_cache(maxsize=1024)
def launch_of(
    kernel: Any,
    grid: tuple[int, int, int],
    integers: tuple[Any, ...],
    num_warps: int,
    device: torch.device,
    dtypes: tuple[Any, ...] = (),
) -> Launch:
    """One for all calls that Triton's dispatch would tell apart by alignments only.

    Args:
        dtypes: of the tensors that may have several.
    """
    return Launch(kernel, grid, integers, num_warps, device)


def block_of(width: int) -> tuple[int, int]:
    """(columns of a program, its warps)."""
    block = min(max(triton.next_power_of_2(width), 32), WIDEST)
    return block, max(1, block // 128)


def on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
