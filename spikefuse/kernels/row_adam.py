"""One step of Adam on the rows of a weight that have a gradient, on a CPU."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from spikefuse.kernels.numba_runtime import flat, kernel, load, store
from spikefuse.kernels.numba_threads import shared


@kernel
def _step(first, last, width, rows, weight, mean, square, grad, rate, beta1, beta2, scale, eps):
    one = np.float32(1.0)
    for k in range(first, last):
        at, source = rows[k] * width, k * width
        for i in range(width):
            g = load(grad, source + i, 3)
            m = load(mean, at + i, 1)
            m += (one - beta1) * (g - m)
            v = beta2 * load(square, at + i, 2) + (one - beta2) * g * g
            store(mean, at + i, m, 1)
            store(square, at + i, v, 2)
            w = load(weight, at + i, 0)
            store(weight, at + i, w - rate * m / (np.sqrt(v) * scale + eps), 0)


def step(
    weight: Tensor,
    mean: Tensor,
    square: Tensor,
    rows: Tensor,
    grad: Tensor,
    rate: float,
    betas: tuple[float, float],
    scale: float,
    eps: float,
) -> None:
    """`weight[r] -= rate m / (scale sqrt(v) + eps)` for the rows r `[K]`, with new moments m, v.

    Args:
        weight, mean, square: float32 `[I, O]`, contiguous; all change in place.
        grad: `[K, O]`, that of the rows.
    """
    arrays = [flat(x) for x in (weight, mean, square, grad.contiguous())]
    numbers = [np.float32(x) for x in (rate, *betas, scale, eps)]
    arguments = weight.shape[1], rows.numpy(), *arrays, *numbers
    shared(_step, len(rows), 1, grad.numel(), *arguments)
