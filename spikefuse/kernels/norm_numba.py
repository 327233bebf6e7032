"""Per-channel mean and variance on a CPU."""

# mypy: disable-error-code="call-arg"
from __future__ import annotations

import numpy as np
from torch import Tensor

from spikefuse.kernels.numba_host import LINE, arrays, shared
from spikefuse.kernels.numba_runtime import kernel, load

# Columns of a tile, which are summed side by side, and the rows that are summed in float32 before
# they are merged in double precision. The first HEAD rows give the origin of the sums.
WIDTH = 256
ROWS, HEAD = 256, 16


def moments(
    x: Tensor, outer: int, channels: int, inner: int, mean: Tensor, variance: Tensor
) -> None:
    """Write the mean and biased variance of each channel of `x`, `[outer, channels, inner]`."""
    values, means, variances = arrays((x, mean, variance))
    work = outer * channels * inner
    shared(_moments, channels, LINE, work, values, outer, channels, inner, means, variances)


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
