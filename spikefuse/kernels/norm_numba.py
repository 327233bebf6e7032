"""`spikefuse.kernels.norm` on a CPU, and the correction of a gradient by its results."""

# mypy: disable-error-code="call-arg"
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spikefuse.kernels.channels import ChannelLayout
from spikefuse.kernels.numba_host import LINE, arrays, shared
from spikefuse.kernels.numba_runtime import channel_rows, kernel, load, store
from spikefuse.kernels.running import Running, update_running_stats

# Columns of a tile, which are summed side by side, and the rows that are summed in float32 before
# they are merged in double precision. The first HEAD rows give the origin of the sums.
WIDTH = 256
ROWS, HEAD = 256, 16
# Neurons that share rows of channel values.
BLOCK = 512


def statistics(
    x: Tensor,
    layout: ChannelLayout,
    repeats: int,
    weight: Tensor | None,
    running: Running,
    eps: float,
) -> Tensor:
    """See `spikefuse.kernels.norm.statistics`."""
    results = torch.empty((4, layout.channels), dtype=torch.float32)
    mean, scale, inverse, variance = results
    values, means, variances = arrays((x, mean, variance))
    shared(_moments, layout.channels, LINE, x.numel(), values, *layout, means, variances)
    torch.rsqrt(variance + eps, out=inverse)
    torch.mul(inverse, 1.0 if weight is None else weight.detach(), out=scale)
    number = repeats * layout.outer * layout.inner
    # The only value of a process that shares its statistics with others.
    update_running_stats(running, mean, variance * (number / max(number - 1, 1)))
    return results


@kernel
def _moments(first, last, x, outer, channels, inner, mean, variance):
    """Compute the moments of channels first ... last - 1.

    Deviations from the mean so far, or from the first row, are summed in float32 over a few rows,
    which stays precise where the mean is large. The sums are merged in double precision.

    Source: Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance", 1983.
    """
    origin, sums, squares = np.empty((3, WIDTH), np.float32)
    count = np.zeros(last - first)
    center = np.zeros(last - first)
    spread = np.zeros(last - first)
    # A tile spans several channels of a row (inner == 1), or a piece of one channel.
    begin, end = (first, last) if inner == 1 else (first * inner, last * inner)
    while begin < end:
        limit = end if inner == 1 else (begin // inner + 1) * inner
        width = min(WIDTH, limit - begin)
        top = 0
        while top < outer:
            rows = min(ROWS if top else HEAD, outer - top)
            for i in range(width):
                c = (begin + i) // inner - first
                origin[i] = center[c] if count[c] else load(x, begin + i, 0)
                sums[i] = squares[i] = np.float32(0.0)
            for row in range(top, top + rows):
                at = row * channels * inner + begin
                for i in range(width):
                    d = load(x, at + i, 0) - origin[i]
                    sums[i] += d
                    squares[i] += d * d
            for i in range(width):
                c = (begin + i) // inner - first
                shift = sums[i] / np.float64(rows)
                total = count[c] + rows
                delta = np.float64(origin[i]) + shift - center[c]
                center[c] += delta * rows / total
                spread[c] += squares[i] - shift * sums[i] + delta * delta * count[c] * rows / total
                count[c] = total
            top += rows
        begin += width
    for c in range(last - first):
        mean[first + c] = center[c]
        variance[first + c] = max(spread[c], 0.0) / count[c]


def merge_statistics(
    shares: Tensor, weight: Tensor | None, running: Running, eps: float
) -> tuple[Tensor, Tensor]:
    """See `spikefuse.kernels.norm.merge_statistics`."""
    channels = shares.shape[1] // 2
    means, variances, numbers = shares.split([channels, channels, 1], 1)
    number = numbers.sum()
    # Deviations from the first mean lose no precision where means are large.
    shift = (numbers * (means - means[:1])).sum(0) / number
    mean = means[0] + shift
    spread = variances + (means - means[:1] - shift).square()
    variance = (numbers * spread).sum(0) / number
    inverse = torch.rsqrt(variance + eps)
    scale = inverse if weight is None else inverse * weight.detach()
    update_running_stats(running, mean, variance * (number / (number - 1)))
    return torch.stack((mean, scale, inverse, variance)), number


def gradient_sums(
    scale_sums: Tensor, shift_sums: Tensor, statistics: Tensor, layout: ChannelLayout, number: float
) -> Tensor:
    """See `spikefuse.kernels.norm.gradient_sums`."""
    grad_weight, share = scale_sums * statistics[2], -statistics[1] / number
    offset, slope = share * shift_sums, share * statistics[2] * grad_weight
    return torch.stack((offset, slope, grad_weight, shift_sums)).float()


def add_correction(
    x: Tensor,
    grad: Tensor,
    strides: Sequence[int],
    grouping: tuple[int, int],
    coefficients: Sequence[Tensor],
) -> None:
    """Add `offset + slope * (x - mean)` to the gradient of `x` before the statistics.

    Args:
        x, grad: `[T, B, C, ...]`, float32; `grad` is changed.
        strides: of time and of groups of adjacent neurons, of `x` and then of `grad`.
        grouping: the number of adjacent neurons, and of neighbours that share a channel.
        coefficients: mean, offset and slope, `[C]` each.
    """
    num_steps, number = len(grad), grad[0].numel()
    sizes = num_steps, *grouping, *strides
    memory = arrays((x, grad, *coefficients))
    shared(_add_correction, number, LINE, grad.numel(), *sizes, *memory)


@kernel
def _add_correction(
    first,
    last,
    T,
    inner,
    channel_inner,
    x_time,
    x_outer,
    grad_time,
    grad_outer,
    x,
    grad,
    mean,
    offset,
    slope,
):
    means, offsets, slopes = np.empty((3, BLOCK), np.float32)
    period, phase = mean.size * channel_inner, -1
    block = BLOCK - BLOCK % period if period <= BLOCK else BLOCK
    for t in range(T):
        base = first
        while base < last:
            group, place = base // inner, base % inner
            m = min(block, last - base, inner - place)
            if phase != base % period:
                phase, count = base % period, min(block, last - base)
                channel_rows(means, count, mean, base, channel_inner)
                channel_rows(offsets, count, offset, base, channel_inner)
                channel_rows(slopes, count, slope, base, channel_inner)
            x_at = t * x_time + group * x_outer + place
            at = t * grad_time + group * grad_outer + place
            for i in range(m):
                deviation = load(x, x_at + i, 0) - load(means, i, 1)
                total = load(grad, at + i, 2) + load(offsets, i, 3)
                store(grad, at + i, total + load(slopes, i, 4) * deviation, 2)
            base += m
