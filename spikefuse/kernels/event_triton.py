"""Products with event lists on GPUs: rows of weights are gathered and summed in a fixed order.

The gradient of the weights is the same sum, over lists of the rows of events in which each input
fired. In these lists and in all sums the order is that of the entries: results are reproducible.

Shape legend: R rows of events, E entries, I inputs, O outputs, L lists.
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
