"""Run generated Numba kernels on CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spikefuse.kernels.numba_host import (
    LARGE,
    LINE,
    advise_huge_pages,
    array_of,
    arrays,
    shared,
)
from spikefuse.kernels.vectors_numba import ROWS, add_spike_rows, panels
from spikefuse.scan.layout import Layout
from spikefuse.scan.program import Operands, Variant

# Results of at least this many bytes leave the caches anyway, so they are written past them, ...
_STREAMED = 1 << 25
# ... in rows of at least this many neurons.
_MIN_ROW = 1 << 10


class _Launch:
    """A kernel and its arguments, except for the addresses of arrays and the parameters."""

    def __init__(
        self,
        kernel: Any,
        layout: Layout,
        sequences: Sequence[Tensor],
        variant: Variant,
        by_channel: bool,
        has_sums: bool,
    ) -> None:
        assert not any(variant)
        self.kernel = kernel
        count = layout.num_steps * layout.num_neurons
        streamed = count * sequences[-1].itemsize >= _STREAMED and layout.inner >= _MIN_ROW
        channels = layout.channels, layout.channel_inner
        self.sizes = (
            *(layout.num_steps, layout.num_neurons, layout.inner),
            *(channels if by_channel else (1, layout.num_neurons)),
            streamed,
        )
        self.strided: list[Any] = []
        for x in sequences:
            self.strided += (array_of(x.dtype), *layout.strides(x))
        self.is_large = count * max(x.itemsize for x in sequences) >= LARGE

    def __call__(
        self,
        sequences: Sequence[Tensor],
        states: Sequence[Tensor | None],
        sums: Sequence[Tensor | None],
        params: Sequence[float | Tensor],
    ) -> None:
        num_steps, count, _, channels = self.sizes[:4]
        # Each thread's range of neurons has sums of its own.
        rows, partial = 1, None
        if sums:
            rows = torch.get_num_threads()
            shape = len(sums), rows, channels
            partial = torch.zeros(shape, dtype=torch.float64, device="cpu")
        accessed = *sequences, *states, *(() if partial is None else partial.unbind(0))
        addresses = []
        for x in accessed:
            addresses.append(0 if x is None else x.data_ptr())
            if self.is_large and x is not None and x.nbytes >= LARGE:
                advise_huge_pages(x)
        arguments = [rows, *self.sizes, tuple(addresses), *self.strided]
        arguments += [_FLOATS] * len(states) + [_DOUBLES] * len(sums)
        tensors = [*filter(torch.is_tensor, params)]
        values = iter(arrays(tensors) if tensors else ())
        for p in params:
            if not isinstance(p, Tensor):
                arguments.append(np.float32(p))
            else:
                arguments.append(next(values) if p.ndim else next(values)[0])
        shared(self.kernel, count, LINE, count * num_steps, *arguments)
        if partial is not None:
            for total, found in zip(sums, partial.sum(1), strict=True):
                assert total is not None
                total.copy_(found)


_FLOATS, _DOUBLES = array_of(torch.float32), array_of(torch.float64)


#: See `spikefuse.scan.program.Launcher`.
prepare = _Launch


def sums_shape(
    layout: Layout, itemsize: int, device: torch.device, by_channel: bool
) -> tuple[tuple[int], torch.dtype]:
    """See `spikefuse.scan.program.Launcher`: threads add their sums to one for each channel."""
    return (layout.channels if by_channel else 1,), torch.float64


# Multiplications of a recurrent product that take about the time of one neuron-step.
_PER_STEP = 32


def new_sums(like: Tensor, count: int) -> list[Tensor]:
    """See `spikefuse.scan.program.Launcher`."""
    # Each thread's range of samples has sums of its own.
    shape = count, torch.get_num_threads(), like.shape[2]
    return [*torch.zeros(shape, dtype=torch.float64, device="cpu")]


def pack(weight: Tensor, transposed: bool) -> Tensor:
    """See `spikefuse.scan.program.Launcher`."""
    return panels(weight if transposed else weight.mT)


def run_recurrent(kernel: Any, operands: Operands) -> None:
    """See `spikefuse.scan.program.Launcher`."""
    read, sums = operands.read, operands.sums
    num_steps, batch, neurons = read[0].shape
    width = operands.weight.shape[1]
    rows = len(sums[0]) if sums else torch.get_num_threads()
    params = [
        p if isinstance(p, Tensor) and p.ndim else np.float32(float(p)) for p in operands.params
    ]
    tensors = [p for p in params if isinstance(p, Tensor)]
    others = *operands.written, *operands.steps, *sums
    given = operands.packed, operands.start, *read, *others, *tensors
    values = iter(arrays(given, are_large=True))
    arguments: list[Any] = [rows, num_steps, batch, neurons, width, next(values), next(values)]
    for x in read:
        arguments += (next(values), x.stride(0), x.stride(1))
    arguments += islice(values, len(others))
    arguments += [next(values) if isinstance(p, Tensor) else p for p in params]
    work = num_steps * batch * neurons * (1 + width // _PER_STEP)
    shared(kernel, batch, ROWS, work, *arguments)


# The share of spikes up to which adding the rows of spikes is surely faster than a dense product:
# on two cores of an AMD EPYC it takes a quarter of the time at 5 %, and less up to 40 %, for one
# head of 256 neurons.
_SPARSE = 1 / 8
# Values of the gradient that stay in a core's cache while all spikes of their steps are added.
_CACHED = 1 << 17


def spike_product(grad: Tensor, spikes: Tensor, heads: int) -> Tensor | None:
    """See `spikefuse.scan.program.Launcher`."""
    start = spikes[0]  # may be any state
    is_binary = bool(((start == 0) | (start == 1)).all())
    if not is_binary or float(spikes.sum()) > _SPARSE * spikes.numel():
        return None
    neurons = grad.shape[2]
    width = neurons // heads
    product = torch.zeros(heads, width, width, device="cpu")
    sizes = len(spikes.flatten(0, 1)), neurons, width, max(1, _CACHED // width)
    values = arrays((product, grad, spikes), are_large=True)
    shared(add_spike_rows, neurons, LINE, grad.numel(), *values, *sizes)
    return product.mT
