"""Products with event lists on GPUs: rows of weights are gathered and summed in a fixed order.

The gradient of the weights is the same sum, over lists of the rows of events in which each input
fired. In these lists and in all sums the order is that of the entries: results are reproducible.

Shape legend: R rows of events, E entries, I inputs, O outputs, L lists, W sites of a row.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from spikefuse.kernels.events import Events

# Columns of a program; one warp reads 128 of them in one 16-byte access a thread.
WIDEST = 512
# Of one row of events: sites that a program lists at a time; rows of weights, and columns, that a
# program sums at a time: enough reads under way to hide the memory's latency.
LISTED = 1 << 14
SUMMED = 32, 64


@triton.jit
def sum_rows(  # type: ignore[no-untyped-def]
    out, source, bias, begins, ends, indices, width, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """out[l] = bias + sum of source[indices[e]] for begins[l] <= e < ends[l]; a program has one
    list l and BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < width
    if HAS_BIAS:
        total = tl.load(bias + column, mask=live, other=0.0)
    else:
        total = tl.zeros([BLOCK], tl.float32)
    end = tl.load(ends + row)
    for e in range(tl.load(begins + row), end):
        i = tl.load(indices + e).to(tl.int64)
        total += tl.load(source + i * width + column, mask=live, other=0.0)
    tl.store(out + row * width + column, total, mask=live)


@triton.jit
def dots(  # type: ignore[no-untyped-def]
    out, weight, grad, indices, rows, width, BLOCK: tl.constexpr
):
    """out[e] = weight[indices[e]] . grad[rows[e]]; a program has one entry."""
    e = tl.program_id(0).to(tl.int64)
    at = tl.load(indices + e).to(tl.int64) * width
    of = tl.load(rows + e).to(tl.int64) * width
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        live = column < width
        w = tl.load(weight + at + column, mask=live, other=0.0)
        total += w * tl.load(grad + of + column, mask=live, other=0.0)
    tl.store(out + e, tl.sum(total, 0))


@triton.jit
def count(marks, fired, silent, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The spikes, whose mark is 2, and the other candidates, 1, of each row; a program has one."""
    row = tl.program_id(0).to(tl.int64)
    spikes = tl.zeros([BLOCK], tl.int32)
    others = tl.zeros([BLOCK], tl.int32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        mark = tl.load(marks + row * width + column, mask=column < width, other=0.0)
        spikes += (mark > 1.5).to(tl.int32)
        others += ((mark > 0.5) & (mark < 1.5)).to(tl.int32)
    tl.store(fired + row, tl.sum(spikes, 0))
    tl.store(silent + row, tl.sum(others, 0))


@triton.jit
def fill(  # type: ignore[no-untyped-def]
    marks, offsets, fired, indices, width, BLOCK: tl.constexpr
):
    """Write the sites of each row to its part of `indices`, spikes first; a program has one row."""
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


@triton.jit
def sum_listed(  # type: ignore[no-untyped-def]
    out,
    weight,
    bias,
    indices,
    count,
    width,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = bias + sum of weight[indices[e]] for e < count[0]; a program has BLOCK columns, and
    reads ROWS rows at a time."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = column < width
    if HAS_BIAS:
        total = tl.load(bias + column, mask=live, other=0.0)
    else:
        total = tl.zeros([BLOCK], tl.float32)
    number = tl.load(count)
    for first in range(0, number, ROWS):
        e = first + tl.arange(0, ROWS)
        i = tl.load(indices + e, mask=e < number, other=0).to(tl.int64)
        there = (e < number)[:, None] & live[None, :]
        rows = tl.load(weight + i[:, None] * width + column[None, :], mask=there, other=0.0)
        total += tl.sum(rows, 0)
    tl.store(out + column, total, mask=live)


@triton.jit
def list_sites(spikes, indices, count, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the sites that fired to `indices`, and their number to `count`; one program."""
    place = tl.sum(tl.zeros([BLOCK], tl.int32), 0)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        spike = tl.load(spikes + column, mask=column < width, other=0.0)
        fired = (spike > 0.5).to(tl.int32)
        tl.store(indices + place + tl.cumsum(fired, 0) - 1, column, mask=fired > 0)
        place += tl.sum(fired, 0)
    tl.store(count, place)


def row_listed(spikes: Tensor) -> tuple[Tensor, Tensor]:
    """See `event_numba.row_listed`; the indices have room for all sites."""
    width = len(spikes)
    indices = torch.empty(width, dtype=torch.int32, device=spikes.device)
    count = torch.empty(1, dtype=torch.int32, device=spikes.device)
    block = min(triton.next_power_of_2(width), LISTED)
    with _on(spikes.device):
        list_sites[(1,)](
            *(spikes.contiguous(), indices, count, width), BLOCK=block, num_warps=_warps(block)
        )
    return indices, count


def row_sum(weight: Tensor, bias: Tensor | None, indices: Tensor, count: Tensor) -> Tensor:
    """See `event_numba.row_sum`; `count` is read on the GPU."""
    width = weight.shape[1]
    out = torch.empty(width, device=weight.device)
    rows, block = SUMMED
    with _on(weight.device):
        sum_listed[(triton.cdiv(width, block),)](
            *(out, weight, weight if bias is None else bias, indices, count, width),
            HAS_BIAS=bias is not None,
            ROWS=rows,
            BLOCK=block,
            num_warps=4,
        )
    return out


def _warps(block: int) -> int:
    """Of a program that is alone: 16 numbers for each thread."""
    return min(max(block // 512, 1), 32)


def listed(marks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `event_numba.listed`."""
    marks, width = marks.contiguous(), marks.shape[1]
    fired, silent = torch.empty(2, len(marks), dtype=torch.int32, device=marks.device)
    offsets = torch.zeros(len(marks) + 1, dtype=torch.int64, device=marks.device)
    block, warps = _block(width)
    grid = (len(marks),)
    with _on(marks.device):
        if len(marks):
            count[grid](marks, fired, silent, width, BLOCK=block, num_warps=warps)
        torch.cumsum(fired + silent, 0, out=offsets[1:])
        indices = torch.empty(int(offsets[-1]), dtype=torch.int32, device=marks.device)
        if len(indices):
            fill[grid](marks, offsets, fired, indices, width, BLOCK=block, num_warps=warps)
    return offsets, fired, indices


def _block(width: int) -> tuple[int, int]:
    """(columns of a program, its warps)."""
    block = min(max(triton.next_power_of_2(width), 32), WIDEST)
    return block, max(1, block // 128)


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _sums(
    source: Tensor, bias: Tensor | None, begins: Tensor, ends: Tensor, indices: Tensor
) -> Tensor:
    """`[L, O]`: for each list the sum of the rows of `source` `[..., O]` that it names."""
    width = source.shape[1]
    out = torch.empty(len(begins), width, device=source.device)
    block, warps = _block(width)
    if out.numel():
        with _on(source.device):
            sum_rows[(len(begins), triton.cdiv(width, block))](
                *(out, source, source if bias is None else bias, begins, ends, indices, width),
                HAS_BIAS=bias is not None,
                BLOCK=block,
                num_warps=warps,
            )
    return out


def currents(events: Events, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `event_numba.currents`."""
    begins = events.offsets[:-1]
    return _sums(weight, bias, begins, begins + events.fired, events.indices)


def gradients(
    events: Events, grad: Tensor, weight: Tensor, sparse: bool
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
    """See `event_numba.gradients`."""
    grad, rows = grad.contiguous(), events.rows()
    fired = events.is_fired() > 0
    inputs, order = torch.sort(events.indices[fired], stable=True)
    touched = None
    if sparse:
        touched, counts = torch.unique_consecutive(inputs, return_counts=True)
        touched = touched.long()
    else:
        counts = torch.bincount(inputs, minlength=len(weight))
    ends = counts.cumsum(0)
    grad_weight = _sums(grad, None, ends - counts, ends, rows[fired][order])
    values = None if events.values is None else _dots(weight, grad, events.indices, rows)
    return touched, grad_weight, grad.sum(0), values


def _dots(weight: Tensor, grad: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    out = torch.empty(len(indices), device=weight.device)
    block, warps = _block(weight.shape[1])
    if len(out):
        with _on(weight.device):
            dots[(len(out),)](
                *(out, weight, grad, indices, rows, weight.shape[1]), BLOCK=block, num_warps=warps
            )
    return out
