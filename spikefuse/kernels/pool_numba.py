"""`spikefuse.kernels.pool` on a CPU, for the windows that `Maps.has_pairs` describes.

Source and target pixels of a row are adjacent, so that the loops over them vectorize. PyTorch's own
pooling does so in channels-last memory only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spikefuse.kernels.numba_host import arrays, shared
from spikefuse.kernels.numba_runtime import fill_row, kernel, load, store, unsigned
from spikefuse.kernels.pool_layout import Maps


def forward(x: Tensor, maps: Maps, save: bool) -> tuple[Tensor, Tensor | None]:
    """Return y, and if `save`, the row-major position of each maximum in its window as uint8."""
    y = x.new_empty((*x.shape[:2], maps.out_rows, maps.out_columns))
    positions = torch.empty_like(y, dtype=torch.uint8) if save else None
    memory = arrays((x, y, positions), are_large=True)
    shared(_forward, maps.count_in(x.shape), 1, x.numel(), *memory, *maps[1:5])
    return y, positions


def backward(grad: Tensor, positions: Tensor, shape: torch.Size, maps: Maps) -> Tensor:
    """Return the gradient of an input of `shape`."""
    grad_x = grad.new_empty(shape)
    memory = arrays((grad.contiguous(), positions, grad_x), are_large=True)
    shared(_backward, maps.count_in(shape), 1, grad_x.numel(), *memory, *maps[1:5])
    return grad_x


@kernel
def _forward(first, last, x, y, positions, rows, columns, out_rows, out_columns):
    one = unsigned(1)
    for at in range(first * out_rows, last * out_rows):
        upper = unsigned((at // out_rows * rows + at % out_rows * 2) * columns)
        lower, target = upper + unsigned(columns), unsigned(at * out_columns)
        for i in range(unsigned(out_columns)):
            best, k = load(x, upper + i + i, 0), 0
            best, k = _greater(load(x, upper + i + i + one, 0), 1, best, k)
            best, k = _greater(load(x, lower + i + i, 0), 2, best, k)
            best, k = _greater(load(x, lower + i + i + one, 0), 3, best, k)
            store(y, target + i, best, 1)
            if positions.size:
                positions[target + i] = k


@kernel
def _greater(value, position, best, k):
    """Return the greater of two values and its position: the first of equal ones, the last NaN."""
    greater = (value > best) | (value != value)
    return value if greater else best, position if greater else k


@kernel
def _backward(first, last, grad_y, positions, grad_x, rows, columns, out_rows, out_columns):
    size, one = rows * columns, unsigned(1)
    for at in range(first, last):
        fill_row(grad_x[at * size : (at + 1) * size], size, 0)
        for row in range(out_rows):
            source = unsigned((at * out_rows + row) * out_columns)
            corner = unsigned((at * rows + 2 * row) * columns)
            for i in range(unsigned(out_columns)):
                k = unsigned(positions[source + i])
                place = corner + i + i + (k >> one) * unsigned(columns) + (k & one)
                grad_x[place] = grad_y[source + i]
