"""Moments of each channel on a CPU."""

# mypy: disable-error-code="call-arg"
from __future__ import annotations

import numpy as np
from torch import Tensor

from spikefuse.kernels.numba_runtime import flat, kernel, load
from spikefuse.kernels.numba_threads import parallel

# Neighbours in memory that are summed side by side, and rows of them in float32, the first time
# fewer.
WIDTH = 256
ROWS, HEAD = 256, 16


def moments(
    x: Tensor, outer: int, channels: int, inner: int, mean: Tensor, variance: Tensor
) -> None:
    """Write mean and biased variance of `x`, in memory `[outer, channels, inner]`."""
    arrays = flat(x), outer, channels, inner, mean.numpy(), variance.numpy()
    parallel(_moments, channels, outer * inner, *arrays)


@kernel
def _moments(first, last, x, outer, channels, inner, mean, variance):
    """Of channels first ... last - 1.

    Sums of a few rows are taken in float32, about the mean so far, or the first row, so that a mean
    that is large against the deviation does no harm; they are merged in double precision, as Chan
    et al. do.
    """
    origin, sums, squares = np.empty((3, WIDTH), np.float32)
    count = np.zeros(last - first)
    center = np.zeros(last - first)
    spread = np.zeros(last - first)
    # Tiles are channels of a row, or pieces of a channel's run.
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
