"""Run generated Numba kernels on CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spikefuse.kernels.numba_host import LINE, arrays, shared
from spikefuse.scan.layout import Layout
from spikefuse.scan.program import Variant

# Results of at least this many bytes leave the caches anyway, so they are written past them, ...
_STREAMED = 1 << 25
# ... in rows of at least this many neurons.
_MIN_ROW = 1 << 10


def prepare(kernel: Any, layout: Layout, sequences: Sequence[Tensor], variant: Variant) -> _Launch:
    """See `spikefuse.scan.program.Launcher`."""
    assert not any(variant)
    return _Launch(kernel, layout, sequences)


class _Launch:
    """A kernel and its integer arguments."""

    def __init__(self, kernel: Any, layout: Layout, sequences: Sequence[Tensor]) -> None:
        self.kernel, self.layout = kernel, layout
        self.strides = [layout.strides(x) for x in sequences]
        size = layout.num_steps * layout.num_neurons * sequences[-1].itemsize
        streamed = size >= _STREAMED and layout.inner >= _MIN_ROW
        self.sizes = (
            *(layout.num_steps, layout.num_neurons, layout.inner, layout.channels),
            *(layout.channel_inner, streamed),
        )

    def __call__(
        self,
        sequences: Sequence[Tensor],
        states: Sequence[Tensor | None],
        sums: Sequence[Tensor | None],
        params: Sequence[float | Tensor],
    ) -> None:
        num_steps, count, _, channels = self.sizes[:4]
        partial, rows = None, 1
        if sums:
            # Each thread's range of neurons has sums of its own.
            rows = torch.get_num_threads()
            partial = torch.zeros((len(sums), rows, channels), dtype=torch.float64)
        tensors = filter(torch.is_tensor, params)
        totals = () if partial is None else partial.unbind(0)
        values = iter(arrays((*sequences, *states, *totals, *tensors), are_large=True))
        arguments: list[Any] = [rows, *self.sizes]
        for strides in self.strides:
            arguments += (next(values), *strides)
        arguments += islice(values, len(states) + len(sums))
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
