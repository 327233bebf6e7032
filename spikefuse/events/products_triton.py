"""Products with event lists on GPUs, which gather and sum rows of weights.

The gradient of the weights is the same sum over transposed lists: for each input the rows of events
in which it fired. Lists and sums are in the order of the entries, so results are reproducible.

Shape legend: R rows of events, E entries, I inputs, O outputs, L lists.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spikefuse.events.format import Events
from spikefuse.events.lists_triton import block_of, launch, rows_and_inputs

# For a single row of events: sites that a program lists at a time; rows and columns of weights that
# a program sums at a time, enough reads in flight to hide the memory's latency.
LISTED = 1 << 14
SUMMED = 32, 64


@triton.jit
def sum_rows(  # type: ignore[no-untyped-def]
    out, source, bias, begins, counts, indices, width, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """out[l] = bias + sum of source[indices[e]] over the counts[l] entries e from begins[l] on.

    A program handles one list l and BLOCK columns.
    """
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
    """out[e] = weight[indices[e]] . grad[rows[e]]; a program handles one entry."""
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
    """out = bias + sum of weight[indices[e]] for e < count[0].

    A program handles BLOCK columns, and reads ROWS rows at a time.
    """
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
    """Write the sites that fired to `indices` and their number to `count`, in one program."""
    place = tl.sum(tl.zeros([BLOCK], tl.int32), 0)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        spike = tl.load(spikes + column, mask=column < width, other=0.0)
        fired = (spike > 0.5).to(tl.int32)
        tl.store(indices + place + tl.cumsum(fired, 0) - 1, column, mask=fired > 0)
        place += tl.sum(fired, 0)
    tl.store(count, place)


def list_spikes(spikes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of spikes `[W]`, padded to `[W]`, and their number, int32 `[1]`."""
    width = len(spikes)
    indices = torch.empty(width, dtype=torch.int32, device=spikes.device)
    count = torch.empty(1, dtype=torch.int32, device=spikes.device)
    block = min(triton.next_power_of_2(width), LISTED)
    warps = min(max(block // 512, 1), 32)  # 16 values per thread of the only program
    tensors = spikes.contiguous(), indices, count
    launch(list_sites, (1, 1, 1), tensors, (width, block), warps, repeated=False)
    return indices, count


def listed_currents(weight: Tensor, bias: Tensor | None, indices: Tensor, count: Tensor) -> Tensor:
    """Return `[O]`: the bias plus the rows of `weight [I, O]` of the first `count` indices.

    Kernels read `count` on the GPU.
    """
    width = weight.shape[1]
    out = torch.empty(width, dtype=torch.float32, device=weight.device)
    tensors = out, weight, weight if bias is None else bias, indices, count
    grid = triton.cdiv(width, SUMMED[1]), 1, 1
    launch(sum_listed, grid, tensors, (width, bias is not None, *SUMMED), 4, repeated=False)
    return out


def currents(events: Events, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `[R, O]`: the bias plus the rows of `weight [I, O]` of the inputs that fired."""
    return _sums(weight, bias, events.offsets[:-1], events.fired, events.indices)


def gradients(events: Events, grad: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return gradients as `products_numba.gradients` does, given `grad` `[R, O]` of `currents`."""
    grad = grad.contiguous()
    rows, inputs = rows_and_inputs(events.lists, len(weight))
    # A stable sort preserves the order of the entries; those that did not fire come last.
    inputs, order = torch.sort(inputs, stable=True)
    every = torch.arange(len(weight) + 1, dtype=inputs.dtype, device=inputs.device)
    bounds = torch.searchsorted(inputs, every)
    grad_weight = _sums(grad, None, bounds[:-1], bounds.diff(), rows[order])
    values = None if events.values is None else _dots(weight, grad, events.indices, rows)
    return grad_weight, grad.sum(0), values


def _sums(
    source: Tensor, bias: Tensor | None, begins: Tensor, counts: Tensor, indices: Tensor
) -> Tensor:
    """Return `[L, O]`: the bias plus the rows of `source` `[..., O]` in each list."""
    width = source.shape[1]
    out = torch.empty(len(begins), width, dtype=torch.float32, device=source.device)
    if out.numel():
        block, warps = block_of(width)
        grid = len(begins), triton.cdiv(width, block), 1
        tensors = out, source, source if bias is None else bias, begins, counts, indices
        launch(sum_rows, grid, tensors, (width, bias is not None, block), warps)
    return out


def _dots(weight: Tensor, grad: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    out = torch.empty(len(indices), dtype=torch.float32, device=weight.device)
    if len(out):
        block, warps = block_of(weight.shape[1])
        tensors, integers = (out, weight, grad, indices, rows), (weight.shape[1], block)
        launch(dots, (len(out), 1, 1), tensors, integers, warps, repeated=False)
    return out
