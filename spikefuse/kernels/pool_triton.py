"""Maxima and means of windows: `spikefuse.kernels.pool` on a GPU, or in Triton's interpreter.

All sizes except the number of maps are compile-time constants, so that locating a pixel needs no
division. In channels-last memory, threads access 16 bytes at a time if the number of channels is a
multiple of 16.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from spikefuse.kernels.pool_layout import MAX_MAP, Maps
from spikefuse.kernels.triton_runtime import TritonLaunch

# Values per thread block (forward, backward), keyed on channels-last memory; warps per block.
BLOCKS = {True: (1024, 1024), False: (512, 1024)}
WARPS = 4


@triton.jit
def _pixels(
    maps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return offset, mask, map, row, column and channel of the block's values in its group."""
    left = tl.minimum(maps - tl.program_id(1).to(tl.int64) * GROUP, GROUP).to(tl.int32)
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = offset < tl.multiple_of(left * (ROWS * COLUMNS * INNER), UNIT)
    pixel = offset // INNER
    row = pixel // COLUMNS
    return offset, live, row // ROWS, row % ROWS, pixel % COLUMNS, offset % INNER


@triton.jit
def _group(values: tl.constexpr, GROUP: tl.constexpr):
    """Return the offset of the block's group of maps, each with `values` values."""
    return tl.program_id(1).to(tl.int64) * (GROUP * values)


@triton.jit(do_not_specialize=["maps"])
def forward_kernel(
    x_ptr,
    y_ptr,
    positions_ptr,
    maps: tl.int64,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUT_ROWS: tl.constexpr,
    OUT_COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DOWN: tl.constexpr,
    RIGHT: tl.constexpr,
    TOP: tl.constexpr,
    LEFT: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    MEAN: tl.constexpr,
):
    offset, live, at, row, column, inner = _pixels(
        maps, OUT_ROWS, OUT_COLUMNS, INNER, GROUP, UNIT, BLOCK
    )
    top, left = row * DOWN - TOP, column * RIGHT - LEFT
    x_ptr += _group(ROWS * COLUMNS * INNER, GROUP)
    corner = ((at * ROWS + top) * COLUMNS + left) * INNER + inner
    best = tl.full([BLOCK], 0.0 if MEAN else float("-inf"), tl.float32)
    # The first value wins if none is greater than -inf.
    position = tl.maximum(-top, 0) * WIDTH + tl.maximum(-left, 0)
    for k in tl.static_range(HEIGHT * WIDTH):
        h, w = top + k // WIDTH, left + k % WIDTH
        inside = live
        if TOP > 0:
            inside &= h >= 0
        if (OUT_ROWS - 1) * DOWN - TOP + HEIGHT > ROWS:
            inside &= h < ROWS
        if LEFT > 0:
            inside &= w >= 0
        if (OUT_COLUMNS - 1) * RIGHT - LEFT + WIDTH > COLUMNS:
            inside &= w < COLUMNS
        place = corner + (k // WIDTH * COLUMNS + k % WIDTH) * INNER
        x = tl.load(x_ptr + place, mask=inside, other=0.0 if MEAN else float("-inf"))
        x = x.to(tl.float32)
        if MEAN:
            best += x
        else:
            better = (x > best) | (x != x)
            best = tl.where(better, x, best)
            position = tl.where(better, k, position)
    if MEAN:
        best /= HEIGHT * WIDTH
    start = _group(OUT_ROWS * OUT_COLUMNS * INNER, GROUP)
    tl.store(y_ptr + start + offset, best.to(y_ptr.dtype.element_ty), mask=live)
    if positions_ptr is not None:
        tl.store(positions_ptr + start + offset, position.to(tl.uint8), mask=live)


@triton.jit(do_not_specialize=["maps"])
def backward_kernel(
    grad_y_ptr,
    positions_ptr,
    grad_x_ptr,
    maps: tl.int64,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUT_ROWS: tl.constexpr,
    OUT_COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DOWN: tl.constexpr,
    RIGHT: tl.constexpr,
    TOP: tl.constexpr,
    LEFT: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    MEAN: tl.constexpr,
):
    offset, live, at, row, column, inner = _pixels(maps, ROWS, COLUMNS, INNER, GROUP, UNIT, BLOCK)
    start = _group(OUT_ROWS * OUT_COLUMNS * INNER, GROUP)
    grad_y_ptr += start
    if not MEAN:
        positions_ptr += start
    # The last window that can contain the pixel, and the pixel's row and column in it.
    row, column = row + TOP, column + LEFT
    last_row, last_column = row // DOWN, column // RIGHT
    h, w = row % DOWN, column % RIGHT
    # The number of windows per direction that can contain a pixel.
    HIGH: tl.constexpr = (HEIGHT + DOWN - 1) // DOWN
    WIDE: tl.constexpr = (WIDTH + RIGHT - 1) // RIGHT
    grad_x = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(HIGH * WIDE):
        above, before = HIGH - 1 - k // WIDE, WIDE - 1 - k % WIDE
        out_row, out_column = last_row - above, last_column - before
        position = (h + above * DOWN) * WIDTH + w + before * RIGHT
        inside = live & (out_row >= 0) & (out_row < OUT_ROWS)
        inside &= (out_column >= 0) & (out_column < OUT_COLUMNS)
        if HEIGHT % DOWN > 0:
            inside &= h + above * DOWN < HEIGHT
        if WIDTH % RIGHT > 0:
            inside &= w + before * RIGHT < WIDTH
        place = ((at * OUT_ROWS + out_row) * OUT_COLUMNS + out_column) * INNER + inner
        grad = tl.load(grad_y_ptr + place, mask=inside, other=0.0).to(tl.float32)
        if MEAN:
            grad_x += grad / (HEIGHT * WIDTH)
        else:
            winner = tl.load(positions_ptr + place, mask=inside, other=0).to(tl.int32)
            grad_x += tl.where(inside & (winner == position), grad, 0.0)
    grad_x_ptr += _group(ROWS * COLUMNS * INNER, GROUP)
    tl.store(grad_x_ptr + offset, grad_x.to(grad_x_ptr.dtype.element_ty), mask=live)


def mean(x: Tensor, maps: Maps) -> Tensor:
    """Return the means of the windows."""
    shape = (*x.shape[:2], maps.out_rows, maps.out_columns)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=maps.memory_format)
    _launch(False, maps.count_in(x.shape), maps, x.dtype, x.device, True)((x, y, None))
    return y


def mean_backward(grad: Tensor, shape: torch.Size, maps: Maps) -> Tensor:
    """Return the gradient of an input of `shape` of `mean`."""
    grad = grad.contiguous(memory_format=maps.memory_format)
    grad_x = torch.empty(
        shape, dtype=grad.dtype, device=grad.device, memory_format=maps.memory_format
    )
    _launch(True, maps.count_in(shape), maps, grad.dtype, grad.device, True)((grad, None, grad_x))
    return grad_x


def forward(x: Tensor, maps: Maps, save: bool) -> tuple[Tensor, Tensor | None]:
    """Return y, and if `save`, the row-major position of each maximum in its window as uint8."""
    shape = (*x.shape[:2], maps.out_rows, maps.out_columns)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=maps.memory_format)
    positions = torch.empty_like(y, dtype=torch.uint8) if save else None
    num = maps.count_in(x.shape)
    if save:
        _launch(True, num, maps, x.dtype, x.device).compile_ahead((y, positions, x))
    _launch(False, num, maps, x.dtype, x.device)((x, y, positions))
    return y, positions


def backward(grad: Tensor, positions: Tensor, shape: torch.Size, maps: Maps) -> Tensor:
    """Return the gradient of an input of `shape`, in the memory format of `positions`."""
    grad = grad.contiguous(memory_format=maps.memory_format)
    grad_x = torch.empty(
        shape, dtype=grad.dtype, device=grad.device, memory_format=maps.memory_format
    )
    launch = _launch(True, maps.count_in(shape), maps, grad.dtype, grad.device)
    launch((grad, positions, grad_x))
    return grad_x


@lru_cache(maxsize=512)
def _launch(
    is_backward: bool,
    num: int,
    maps: Maps,
    dtype: torch.dtype,
    device: torch.device,
    is_mean: bool = False,
) -> TritonLaunch:
    # Not keyed on the kernel, which is slow to hash.
    kernel = backward_kernel if is_backward else forward_kernel
    window, rows, columns, out_rows, out_columns, inner = maps
    read, written = rows * columns * inner, out_rows * out_columns * inner
    size = read if is_backward else written
    # Maps per group: offsets fit in 32 bits, and groups start at multiples of 16 bytes.
    group = MAX_MAP // max(read, written)
    group = group // 16 * 16 if group >= 16 else group
    unit = 1 if num * size % 16 or group * size % 16 else 16
    block = BLOCKS[inner > 1][is_backward]
    grid = (-(-min(group, num) * size // block), -(-num // group), 1)
    pairs = (*window.kernel, *window.stride, *window.padding)
    integers = (num, *maps[1:], *pairs, group, unit, block, is_mean)
    return TritonLaunch(kernel, grid, integers, WARPS, device)
