"""Build and read event lists on GPUs; a program of every kernel handles one row.

Nothing here synchronizes with the GPU: the caller determines the length of a list.

Shape legend: R rows, E entries, W sites of a row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from spikefuse.events.lists import EventLists
from spikefuse.kernels.triton_runtime import TritonLaunch

# Most columns of a program: one warp reads 128 of them in one 16-byte access per thread.
WIDEST = 512
# Entries that a program handles at a time, and its warps.
ENTRIES, WARPS = 256, 2

Grid = tuple[int, int, int]


@triton.jit
def count(marks, fired, entries, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count the spikes (mark 2) and all entries (marks 1 and 2) of a row."""
    row = tl.program_id(0).to(tl.int64)
    spikes = tl.zeros([BLOCK], tl.int32)
    both = tl.zeros([BLOCK], tl.int32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        mark = tl.load(marks + row * width + column, mask=column < width, other=0.0)
        spikes += (mark > 1.5).to(tl.int32)
        both += (mark > 0.5).to(tl.int32)
    tl.store(fired + row, tl.sum(spikes, 0))
    tl.store(entries + row, tl.sum(both, 0))


@triton.jit
def fill(  # type: ignore[no-untyped-def]
    marks, offsets, fired, indices, width, BLOCK: tl.constexpr
):
    """Write the sites of a row to its range of `indices`, spikes first."""
    row = tl.program_id(0).to(tl.int64)
    spikes = tl.load(offsets + row)
    nears = spikes + tl.load(fired + row)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        mark = tl.load(marks + row * width + column, mask=column < width, other=0.0)
        spike = (mark > 1.5).to(tl.int32)
        near = ((mark > 0.5) & (mark < 1.5)).to(tl.int32)
        tl.store(indices + spikes + tl.cumsum(spike, 0) - 1, column, mask=spike > 0)
        tl.store(indices + nears + tl.cumsum(near, 0) - 1, column, mask=near > 0)
        spikes += tl.sum(spike, 0)
        nears += tl.sum(near, 0)


@triton.jit(do_not_specialize=["none"])
def describe(  # type: ignore[no-untyped-def]
    rows, values, inputs, offsets, fired, indices, none, BLOCK: tl.constexpr
):
    """Write, for each entry of a row and unless None: the row to `rows`, 1 or 0 for fired or not to
    `values`, and the site if it fired, else `none`, to `inputs`."""
    row = tl.program_id(0)
    begin = tl.load(offsets + row)
    end, near = tl.load(offsets + row + 1), begin + tl.load(fired + row)
    for first in range(begin, end, BLOCK):
        e = first + tl.arange(0, BLOCK)
        live = e < end
        if rows is not None:
            tl.store(rows + e, tl.zeros([BLOCK], tl.int32) + row, mask=live)
        if values is not None:
            tl.store(values + e, (e < near).to(tl.float32), mask=live)
        if inputs is not None:
            site = tl.load(indices + e, mask=live, other=0)
            tl.store(inputs + e, tl.where(e < near, site, none), mask=live)


@triton.jit(do_not_specialize=["width"])
def scatter(  # type: ignore[no-untyped-def]
    out, values, offsets, fired, indices, width, BLOCK: tl.constexpr
):
    """out[row, indices[e]] = values[e] for the entries of a row, or 1 for its spikes if there are
    no values."""
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


class DenseMarks:
    """Counted marks `[R, W]`; see `CountedMarks`."""

    def __init__(self, marks: Tensor) -> None:
        self.marks = marks.contiguous()
        self.fired, self.entries = torch.empty(
            2, len(marks), dtype=torch.int32, device=marks.device
        )
        self._launch(count, self.fired, self.entries)

    def sites(self, offsets: Tensor, size: int) -> Tensor:
        indices = torch.empty(size, dtype=torch.int32, device=offsets.device)
        if size:
            self._launch(fill, offsets, self.fired, indices)
        return indices

    def _launch(self, kernel: Any, *outputs: Tensor) -> None:
        rows, width = self.marks.shape
        if rows:
            block, warps = block_of(width)
            launch(kernel, (rows, 1, 1), (self.marks, *outputs), (width, block), warps)


def count_marks(marks: Tensor) -> DenseMarks:
    """Count the entries of marks `[R, W]`, float32."""
    return DenseMarks(marks)


def is_fired(lists: EventLists) -> Tensor:
    """Return float32 `[E]`: 1 for entries that fired, else 0."""
    found = torch.empty_like(lists.indices, dtype=torch.float32)
    _describe(lists, values=found)
    return found


def rows_and_inputs(lists: EventLists, none: int) -> tuple[Tensor, Tensor]:
    """Return int32 `[E]` each: the rows of the entries, and their sites, `none` if not fired."""
    found, inputs = torch.empty_like(lists.indices), torch.empty_like(lists.indices)
    _describe(lists, rows=found, inputs=inputs, none=none)
    return found, inputs


def _describe(
    lists: EventLists,
    rows: Tensor | None = None,
    values: Tensor | None = None,
    inputs: Tensor | None = None,
    none: int = 0,
) -> None:
    if len(lists.indices):
        grid = len(lists.fired), 1, 1
        launch(describe, grid, (rows, values, inputs, *lists), (none, ENTRIES), WARPS)


def dense(lists: EventLists, width: int, values: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `[R, width]`: `values` at the sites of the entries, or the spikes if it is None."""
    out = torch.zeros(len(lists.fired), width, dtype=dtype, device=lists.indices.device)
    if len(lists.indices):
        values = None if values is None else values.contiguous()
        launch(scatter, (len(out), 1, 1), (out, values, *lists), (width, ENTRIES), WARPS)
    return out


def launch(
    kernel: Any,
    grid: Grid,
    tensors: Sequence[Tensor | None],
    integers: tuple[Any, ...],
    warps: int,
    repeated: bool = True,
) -> None:
    """Run a kernel.

    Args:
        tensors: the first arguments of the kernel.
        integers: its last arguments, constants included.
        repeated: cache the launch. False if grid, integers or dtypes depend on the data.
    """
    device = next(x.device for x in tensors if x is not None)
    if repeated:
        dtypes = tuple([None if x is None else x.dtype for x in tensors])
        _cached_launch(kernel, grid, integers, warps, device, dtypes)(tensors)
        return
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[grid](*tensors, *integers, num_warps=warps)


@lru_cache(maxsize=512)
def _cached_launch(
    kernel: Any,
    grid: Grid,
    integers: tuple[Any, ...],
    warps: int,
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],
) -> TritonLaunch:
    return TritonLaunch(kernel, grid, integers, warps, device)


def block_of(width: int) -> tuple[int, int]:
    """Return the columns and the warps of a program for rows of this width."""
    block = min(max(triton.next_power_of_2(width), 32), WIDEST)
    return block, max(1, block // 128)
