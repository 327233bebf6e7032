"""`spikefuse.kernels.norm` on a GPU, or in Triton's interpreter.

Memory `[outer, channels, inner]` is cut into tiles of channels and shares of rows. Each thread
block stores the sums of its share. The last block of a tile, found by an atomic counter, combines
them in the order of the shares, so results are deterministic.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from spikefuse.kernels.channels import ChannelLayout
from spikefuse.kernels.running import Running
from spikefuse.kernels.triton_runtime import TritonLaunch, current_stream, multiprocessors

# Channels per tile; tiles whose loads are issued together; warps per block; target number of thread
# blocks per multiprocessor. In a tile, a thread reads 16 bytes.
WIDTH, TILES, WARPS, BLOCKS = 32, 4, 8, 2
# The last block combines all shares of a tile at once: at most MAX_SHARES, faster for FEW_SHARES.
MAX_SHARES, FEW_SHARES = 128, 32
# Rows whose mean is the origin of the sums.
HEAD: tl.constexpr = tl.constexpr(16)
# Stages of the software pipeline.
STAGES: tl.constexpr = tl.constexpr(3)


@triton.jit
def _tile(channels, inner, first, height: tl.constexpr, width: tl.constexpr, last: tl.constexpr):
    """Return the offsets of a tile's first rows, its columns, their number, and the row stride."""
    tile = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, width)[None, :]
    if last:
        start, length, stride = tile * width, channels - tile * width, channels
    else:
        start, length, stride = tile * inner, inner, channels * inner
    offsets = (first + tl.arange(0, height)[:, None]) * stride + start + column
    return offsets, column, length, stride


@triton.jit
def _over_rows(values, last: tl.constexpr):
    """Sum over rows to one value per channel of the tile."""
    total = tl.sum(values, 0)
    if not last:
        total = tl.sum(total, 0) + tl.zeros([1], tl.float32)
    return total


@triton.jit
def _is_last(arrived_ptr):
    """Whether all other shares of this tile have been stored."""
    tl.debug_barrier()
    counter = arrived_ptr + tl.program_id(0)
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(1) - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def _combined(
    means_ptr,
    spreads_ptr,
    rows,
    outer,
    each,
    channels,
    exists,
    CHANNELS: tl.constexpr,
    SHARES: tl.constexpr,
):
    """Combine the shares to mean and variance, relative to the mean of the first share."""
    share = tl.arange(0, SHARES)[:, None]
    live = (share < tl.num_programs(1)) & exists[None, :]
    means = tl.load(means_ptr[None, :] + share * channels, live, 0.0, cache_modifier=".cg")
    spreads = tl.load(spreads_ptr[None, :] + share * channels, live, 0.0, cache_modifier=".cg")
    base = tl.load(means_ptr, mask=exists, other=0.0, cache_modifier=".cg")
    n = (tl.minimum(outer - share * rows, rows) * each).to(tl.float32)
    number = (outer * each).to(tl.float32)
    d = tl.where(live, means - base[None, :], 0.0)
    shift = tl.div_rn(tl.sum(n * d, 0), number)
    d = tl.where(live, d - shift[None, :], 0.0)
    variance = tl.div_rn(tl.maximum(tl.sum(spreads + n * d * d, 0), 0.0), number)
    return base + shift, variance


@triton.jit
def _store_statistics(results_ptr, weight_ptr, c, channels, exists, mean, variance, eps):
    inverse = tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
    scale = inverse
    if weight_ptr is not None:
        scale = inverse * tl.load(weight_ptr + c, mask=exists, other=0.0).to(tl.float32)
    tl.store(results_ptr + c, mean, mask=exists)
    tl.store(results_ptr + channels + c, scale, mask=exists)
    tl.store(results_ptr + 2 * channels + c, inverse, mask=exists)
    tl.store(results_ptr + 3 * channels + c, variance, mask=exists)


@triton.jit
def _average(at, value, momentum, mask):
    """Store `(1 - momentum) * old + momentum * value`."""
    old = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (1.0 - momentum) * old + momentum * value, mask=mask)


@triton.jit
def _update_running_stats(
    running_mean, running_var, num_batches, c, exists, mean, variance, number, momentum
):
    if running_mean is not None:
        unbiased = variance * tl.div_rn(number, number - 1.0)
        _average(running_mean + c, mean, momentum, exists)
        _average(running_var + c, unbiased, momentum, exists)
    if num_batches is not None:  # noqa: SIM102
        if tl.program_id(0) == 0:
            tl.store(num_batches, tl.load(num_batches) + 1)


@triton.jit(do_not_specialize=["shares", "channels"])
def merge_kernel(
    shares_ptr,
    weight_ptr,
    running_mean,
    running_var,
    num_batches,
    results_ptr,
    number_ptr,
    momentum: tl.float32,
    eps: tl.float32,
    shares: tl.int64,
    channels: tl.int64,
    WIDTH: tl.constexpr,
    SHARES: tl.constexpr,
):
    """See `spikefuse.kernels.norm.merge_statistics`."""
    c = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    exists = c < channels
    share = tl.arange(0, SHARES)[:, None]
    rows_ptr, live = shares_ptr + share * (2 * channels + 1), share < shares
    n = tl.load(rows_ptr + 2 * channels, mask=live, other=0.0)
    number = tl.sum(tl.sum(n, 1), 0)
    live = live & exists[None, :]
    means = tl.load(rows_ptr + c[None, :], mask=live, other=0.0)
    variances = tl.load(rows_ptr + channels + c[None, :], mask=live, other=0.0)
    # Deviations from the first mean lose no precision where means are large.
    base = tl.load(shares_ptr + c, mask=exists, other=0.0)
    d = tl.where(live, means - base[None, :], 0.0)
    shift = tl.div_rn(tl.sum(n * d, 0), number)
    d = tl.where(live, d - shift[None, :], 0.0)
    mean, variance = base + shift, tl.div_rn(tl.sum(n * (variances + d * d), 0), number)
    _store_statistics(results_ptr, weight_ptr, c, channels, exists, mean, variance, eps)
    _update_running_stats(
        running_mean, running_var, num_batches, c, exists, mean, variance, number, momentum
    )
    if tl.program_id(0) == 0:
        tl.store(number_ptr, number)


@triton.jit(do_not_specialize=["outer", "channels", "inner", "rows", "repeats"])
def statistics_kernel(
    x_ptr,
    weight_ptr,
    running_mean,
    running_var,
    num_batches,
    results_ptr,
    partial_ptr,
    arrived_ptr,
    momentum: tl.float32,
    eps: tl.float32,
    outer: tl.int64,
    channels: tl.int64,
    inner: tl.int64,
    rows: tl.int64,
    repeats: tl.int64,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    LAST: tl.constexpr,
    UNIT: tl.constexpr,
    SHARES: tl.constexpr,
):
    if LAST:
        channels = channels * UNIT
    else:
        inner = inner * UNIT
    shares = tl.num_programs(1)
    share = tl.program_id(1).to(tl.int64)
    first = share * rows
    count = tl.minimum(outer - first, rows)
    offsets, column, length, stride = _tile(channels, inner, first, HEIGHT, WIDTH, LAST)
    row = tl.arange(0, HEIGHT)[:, None]

    CHANNELS: tl.constexpr = WIDTH if LAST else 1
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = c < channels
    # Deviations from the mean of the first rows lose no precision where the mean is large.
    head = tl.arange(0, HEAD)[:, None]
    heads_ptr = x_ptr + (first + head) * stride + (c * (1 if LAST else inner))[None, :]
    seen = tl.load(heads_ptr, (head < count) & exists[None, :], 0.0).to(tl.float32)
    origin = tl.div_rn(tl.sum(seen, 0), tl.minimum(count, HEAD).to(tl.float32))
    sums = tl.zeros([HEIGHT, WIDTH], tl.float32)
    squares = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for top in tl.range(0, count, HEIGHT * TILES, num_stages=STAGES):
        for start in range(0, WIDTH if LAST else length, WIDTH):
            width = tl.multiple_of(tl.minimum(length - start, WIDTH).to(tl.int32), UNIT)
            tiles = ()
            for i in tl.static_range(TILES):
                live = (row < count - top - i * HEIGHT) & (column < width)
                at = x_ptr + offsets + ((top + i * HEIGHT) * stride + start)
                tiles += (tl.load(at, mask=live, other=0.0),)  # type: ignore[assignment]
            for i in tl.static_range(TILES):
                live = (row < count - top - i * HEIGHT) & (column < width)
                d = tl.where(live, tiles[i].to(tl.float32) - origin[None, :], 0.0)
                sums, squares = sums + d, squares + d * d
    each = 1 if LAST else inner
    total = _over_rows(sums, LAST)
    shift = tl.div_rn(total, (count * each).to(tl.float32))
    spread = _over_rows(squares, LAST) - shift * total
    means_ptr, spreads_ptr = partial_ptr + c, partial_ptr + shares * channels + c
    tl.store(means_ptr + share * channels, origin + shift, mask=exists)
    tl.store(spreads_ptr + share * channels, spread, mask=exists)

    if _is_last(arrived_ptr):
        mean, variance = _combined(
            means_ptr, spreads_ptr, rows, outer, each, channels, exists, CHANNELS, SHARES
        )
        _store_statistics(results_ptr, weight_ptr, c, channels, exists, mean, variance, eps)
        number = (outer * each * repeats).to(tl.float32)
        _update_running_stats(
            running_mean, running_var, num_batches, c, exists, mean, variance, number, momentum
        )


@triton.jit
def _sum_of_shares(sums_ptr, channels, exists, SHARES: tl.constexpr):
    share = tl.arange(0, SHARES)[:, None]
    live = (share < tl.num_programs(1)) & exists[None, :]
    at = sums_ptr[None, :] + share * channels
    return tl.sum(tl.load(at, mask=live, other=0.0, cache_modifier=".cg"), 0)


@triton.jit(do_not_specialize=["outer", "channels", "inner", "rows"])
def gradient_sums_kernel(
    scale_sums_ptr,
    shift_sums_ptr,
    statistics_ptr,
    results_ptr,
    partial_ptr,
    arrived_ptr,
    number: tl.float32,
    outer: tl.int64,
    channels: tl.int64,
    inner: tl.int64,
    rows: tl.int64,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    LAST: tl.constexpr,
    UNIT: tl.constexpr,
    SHARES: tl.constexpr,
):
    if LAST:
        channels = channels * UNIT
    else:
        inner = inner * UNIT
    shares = tl.num_programs(1)
    share = tl.program_id(1).to(tl.int64)
    first = share * rows
    count = tl.minimum(outer - first, rows)
    offsets, column, length, stride = _tile(channels, inner, first, HEIGHT, WIDTH, LAST)
    row = tl.arange(0, HEIGHT)[:, None]
    scales = tl.zeros([HEIGHT, WIDTH], tl.float32)
    shifts = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for top in tl.range(0, count, HEIGHT * TILES, num_stages=STAGES):
        for start in range(0, WIDTH if LAST else length, WIDTH):
            width = tl.multiple_of(tl.minimum(length - start, WIDTH).to(tl.int32), UNIT)
            for i in tl.static_range(TILES):
                live = (row < count - top - i * HEIGHT) & (column < width)
                at = offsets + ((top + i * HEIGHT) * stride + start)
                scales += tl.load(scale_sums_ptr + at, mask=live, other=0.0)
                shifts += tl.load(shift_sums_ptr + at, mask=live, other=0.0)
    CHANNELS: tl.constexpr = WIDTH if LAST else 1
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = c < channels
    scales_ptr, shifts_ptr = partial_ptr + c, partial_ptr + shares * channels + c
    tl.store(scales_ptr + share * channels, _over_rows(scales, LAST), mask=exists)
    tl.store(shifts_ptr + share * channels, _over_rows(shifts, LAST), mask=exists)

    if _is_last(arrived_ptr):
        grad_weight = _sum_of_shares(scales_ptr, channels, exists, SHARES)
        grad_shift = _sum_of_shares(shifts_ptr, channels, exists, SHARES)
        scale = tl.load(statistics_ptr + channels + c, mask=exists, other=0.0)
        inverse = tl.load(statistics_ptr + 2 * channels + c, mask=exists, other=0.0)
        negative_share = -tl.div_rn(scale, number)
        tl.store(results_ptr + c, negative_share * grad_shift, mask=exists)
        slope = negative_share * inverse * inverse * grad_weight
        tl.store(results_ptr + channels + c, slope, mask=exists)
        tl.store(results_ptr + 2 * channels + c, inverse * grad_weight, mask=exists)
        tl.store(results_ptr + 3 * channels + c, grad_shift, mask=exists)


class ReductionLaunch:
    """A reduction kernel for one memory layout, with its scratch memory."""

    def __init__(
        self,
        kernel: Any,
        layout: ChannelLayout,
        more: tuple[int, ...],
        device: torch.device,
        itemsize: int,
        captured: bool,
    ) -> None:
        is_last = layout.inner == 1
        length = layout.channels if is_last else layout.inner
        unit = 1 if length % 16 else 16
        width = min(triton.next_power_of_2(length), WIDTH if is_last else 1024)
        height = max(1, WARPS * 32 * 16 // itemsize // width)
        tiles = -(-layout.channels // width) if is_last else layout.channels
        wanted = max(1, BLOCKS * multiprocessors(device) // tiles)
        rows = -(-layout.outer // min(wanted, MAX_SHARES))
        rows = -(-rows // (height * TILES)) * height * TILES
        shares = -(-layout.outer // rows)
        channels, inner = layout.channels, layout.inner
        sizes = (channels // unit, 1) if is_last else (channels, inner // unit)
        max_shares = FEW_SHARES if shares <= FEW_SHARES else MAX_SHARES
        integers = (layout.outer, *sizes, rows, *more)
        constants = (height, width, TILES, is_last, unit, max_shares)
        grid = (tiles, shares, 1)
        self.launch = TritonLaunch(kernel, grid, (*integers, *constants), WARPS, device)
        # Shapes of the results and of the scratch memory.
        self.sizes = (4, channels), (2 * shares, channels)
        self.strides, self.device = (channels, 1), device
        self.tiles, self.arrived = tiles, _take_counters(tiles, device, captured)

    def __call__(self, *arguments: Any, numbers: tuple[float, ...]) -> Tensor:
        """Return the four rows of results."""
        sizes, strides, device, dtype = self.sizes, self.strides, self.device, torch.float32
        results = torch.empty_strided(sizes[0], strides, dtype=dtype, device=device)
        scratch = torch.empty_strided(sizes[1], strides, dtype=dtype, device=device)
        arrived = self.arrived
        if arrived is None:
            arrived = torch.zeros(self.tiles, dtype=torch.int32, device=device)
        self.launch((*arguments, results, scratch, arrived), params=numbers)
        return results


# By device: counters, which are 0 between kernels, and how many of them are in use.
_counters: dict[torch.device, tuple[Tensor, int]] = {}
RESERVE = 1 << 16
_recorded: list[Tensor] = []  # counters of CUDA graphs, which may outlive the launches


def reserve_counters(device: torch.device) -> None:
    """Reserve counters for CUDA graphs.

    Counters that a recording allocates are freed with its graph, and set to 0 by replays only. So
    they are allocated before, and on another thread: torch.compile takes the memory of its own
    thread from a graph's pool before it records the graph.
    """
    counters, used = _counters.get(device, (None, 0))
    if counters is None or used + RESERVE > len(counters):
        with ThreadPoolExecutor(1) as other:
            other.submit(_allocate_counters, device).result()


def _allocate_counters(device: torch.device) -> None:
    counters = torch.zeros(2 * RESERVE, dtype=torch.int32, device=device)
    if counters.is_cuda:
        torch.cuda.synchronize(device)
    _counters[device] = counters, 0


def _take_counters(number: int, device: torch.device, captured: bool) -> Tensor | None:
    """Return counters, or None if none are left, so that each call must allocate its own."""
    if not captured:
        reserve_counters(device)
    counters, used = _counters.get(device, (None, 0))
    if counters is None or used + number > len(counters):
        return None
    # Aligned, because Triton compiles another kernel for pointers that are not.
    _counters[device] = counters, used + -(-number // 4) * 4
    taken = counters[used : used + number]
    if captured:
        _recorded.append(taken)
    return taken


# Keyed by name, because a kernel is slow to hash.
_KERNELS = {"statistics": statistics_kernel, "gradient_sums": gradient_sums_kernel}


@lru_cache(maxsize=512)
def _launch(
    name: str,
    layout: ChannelLayout,
    more: tuple[int, ...],
    device: torch.device,
    dtypes: tuple[torch.dtype, *tuple[torch.dtype | None, ...]],
    owner: tuple[int, bool],
) -> ReductionLaunch:
    """Return the launch for calls that differ in values and alignments only.

    Args:
        owner: the owner of its counters; see `_owner`.
    """
    return ReductionLaunch(
        _KERNELS[name], layout, more, device, dtypes[0].itemsize, captured=owner[1]
    )


def _owner(device: torch.device) -> tuple[int, bool]:
    """Return the current stream, and whether it is being captured.

    A stream runs one kernel at a time. CUDA graphs need their own counters, which are reset only
    when the graph is replayed. Graphs recorded on one stream share them, like PyTorch's own work
    space: they must not be replayed at the same time.
    """
    if device.type == "cpu":
        return 0, False
    return current_stream(device.index), torch.cuda.is_current_stream_capturing()


def statistics(
    x: Tensor,
    layout: ChannelLayout,
    repeats: int,
    weight: Tensor | None,
    running: Running,
    eps: float,
) -> Tensor:
    """See `spikefuse.kernels.norm.statistics`."""
    device, (mean, variance, batches, momentum) = x.device, running
    scale_dtype = None if weight is None else weight.dtype
    dtypes = x.dtype, scale_dtype, None if mean is None else mean.dtype
    launch = _launch("statistics", layout, (repeats,), device, dtypes, _owner(device))
    return launch(x, weight, mean, variance, batches, numbers=(momentum, eps))


def gradient_sums(
    scale_sums: Tensor,
    shift_sums: Tensor,
    statistics: Tensor,
    layout: ChannelLayout,
    number: float,
) -> Tensor:
    """See `spikefuse.kernels.norm.gradient_sums`."""
    device = scale_sums.device
    launch = _launch("gradient_sums", layout, (), device, (torch.float32,), _owner(device))
    return launch(scale_sums, shift_sums, statistics, numbers=(number,))


def compile_gradient_sums(layout: ChannelLayout, device: torch.device) -> None:
    """Begin to compile the kernel of `gradient_sums`."""
    launch = _launch("gradient_sums", layout, (), device, (torch.float32,), _owner(device)).launch
    launch.compile_ahead((*[torch.float32] * 5, torch.int32), params=(1.0,))


def merge_statistics(
    shares: Tensor, weight: Tensor | None, running: Running, eps: float
) -> tuple[Tensor, Tensor]:
    """See `spikefuse.kernels.norm.merge_statistics`."""
    mean, variance, batches, momentum = running
    count, channels = len(shares), shares.shape[1] // 2
    results, number = shares.new_empty((4, channels)), shares.new_empty(())
    dtypes = tuple(None if t is None else t.dtype for t in (weight, mean))
    launch = _merge_launch(count, channels, dtypes, shares.device)
    launch((shares, weight, mean, variance, batches, results, number), params=(momentum, eps))
    return results, number


@lru_cache(maxsize=512)
def _merge_launch(
    count: int, channels: int, dtypes: tuple[torch.dtype | None, ...], device: torch.device
) -> TritonLaunch:
    integers = count, channels, WIDTH, triton.next_power_of_2(count)
    return TritonLaunch(merge_kernel, (-(-channels // WIDTH), 1, 1), integers, 1, device)
