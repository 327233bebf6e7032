"""A kernel over a range of items, for tests and the programs that they start."""

import numpy as np

from spikefuse.kernels.numba_runtime import kernel


@kernel
def add(first, last, sums, values, factor, enabled, more):
    for i in range(first, last):
        sums[i] += factor * values[i] + more[0][i] + more[1]
        if not enabled:
            sums[i] = np.nan
