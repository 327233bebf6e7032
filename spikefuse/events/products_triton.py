"""Products with event lists on GPUs: rows of weights are gathered and summed in a fixed order.

The gradient of the weights is the same sum, over lists of the rows of events in which each input
fired. In these lists and in all sums the order is that of the entries: results are reproducible.

Shape legend: R rows of events, E entries, I inputs, O outputs, L lists.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spikefuse.events.format import Events
from spikefuse.events.lists_triton import block_of, described, launch_of, on

# Of one row of events: sites that a program lists at a time; rows of weights, and columns, that a
# program sums at a time: enough reads under way to hide the memory's latency.
LISTED = 1 << 14
SUMMED = 32, 64


@triton.jit
def sum_rows(  # type: ignore[no-untyped-def]
    out, source, bias, begins, counts, indices, width, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """out[l] = bias + sum of source[indices[e]] over the counts[l] entries e from begins[l] on; a
    program has one list l and BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < width
    if HAS_BIAS:
        total = tl.load(bias + column, mask=live, other=0.0)
    else:
        total = tl.zeros([BLOCK], tl.float32)
    begin = tl.load(begins + row)
    for e in range(begin, begin + tl.load(counts + row)):
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
    with on(spikes.device):
        list_sites[(1,)](
            *(spikes.contiguous(), indices, count, width), BLOCK=block, num_warps=_warps(block)
        )
    return indices, count


def row_sum(weight: Tensor, bias: Tensor | None, indices: Tensor, count: Tensor) -> Tensor:
    """See `event_numba.row_sum`; `count` is read on the GPU."""
    width = weight.shape[1]
    out = torch.empty(width, dtype=torch.float32, device=weight.device)
    rows, block = SUMMED
    with on(weight.device):
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


def _sums(
    source: Tensor,
    bias: Tensor | None,
    begins: Tensor,
    counts: Tensor,
    indices: Tensor,
    often: bool = True,
) -> Tensor:
    """`[L, O]`: for each list the sum of the rows of `source` `[..., O]` that it names.

    Args:
        often: there will be as many lists again.
    """
    width = source.shape[1]
    out = torch.empty(len(begins), width, dtype=torch.float32, device=source.device)
    block, warps = block_of(width)
    if out.numel():
        grid = len(begins), triton.cdiv(width, block), 1
        integers = width, bias is not None, block
        tensors = out, source, source if bias is None else bias, begins, counts, indices
        if often:
            how = sum_rows, grid, integers, warps, source.device, (counts.dtype, indices.dtype)
            launch_of(*how)(tensors)
        else:
            sum_rows[grid](*tensors, *integers, num_warps=warps)
    return out


def currents(events: Events, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `event_numba.currents`."""
    return _sums(weight, bias, events.offsets[:-1], events.fired, events.indices)


def gradients(
    events: Events, grad: Tensor, weight: Tensor, sparse: bool
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
    """See `event_numba.gradients`."""
    grad = grad.contiguous()
    rows, inputs = described(events, len(weight))
    # A stable sort keeps the order of the lists; what did not fire comes last.
    inputs, order = torch.sort(inputs, stable=True)
    every = torch.arange(len(weight) + 1, dtype=inputs.dtype, device=inputs.device)
    bounds = torch.searchsorted(inputs, every)
    begins, counts, touched = bounds[:-1], bounds.diff(), None
    if sparse:
        touched = counts.nonzero().flatten()
        begins, counts = begins[touched], counts[touched]
    grad_weight = _sums(grad, None, begins, counts, rows[order], not sparse)
    values = None if events.values is None else _dots(weight, grad, events.indices, rows)
    return touched, grad_weight, grad.sum(0), values


def _dots(weight: Tensor, grad: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    out = torch.empty(len(indices), dtype=torch.float32, device=weight.device)
    block, warps = block_of(weight.shape[1])
    if len(out):
        with on(weight.device):
            dots[(len(out),)](
                *(out, weight, grad, indices, rows, weight.shape[1]), BLOCK=block, num_warps=warps
            )
    return out
