"""Run generated Numba kernels on CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spikefuse.kernels.numba_host import LINE, arrays, share_of, shared
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
        self.streamed = size >= _STREAMED and layout.inner >= _MIN_ROW

    def __call__(
        self,
        sequences: Sequence[Tensor],
        states: Sequence[Tensor | None],
        sums: Sequence[Tensor | None],
        params: Sequence[float | Tensor],
    ) -> None:
        layout = self.layout
        work = layout.num_neurons * layout.num_steps
        share = share_of(layout.num_neurons, LINE, work)
        # Sums of each range of neurons.
        shape = -(-layout.num_neurons // share), layout.channels
        partial = [torch.zeros(shape, dtype=torch.float64) for _ in sums]
        tensors = filter(torch.is_tensor, params)
        values = arrays((*sequences, *states, *partial, *tensors), are_large=True)
        arguments: list[Any] = [share, layout.num_steps, layout.num_neurons, layout.inner]
        arguments += (layout.channels, layout.channel_inner, self.streamed)
        for memory, strides in zip(values, self.strides, strict=False):
            arguments += (memory, *strides)
        first, split = len(sequences), len(sequences) + len(states) + len(sums)
        arguments += values[first:split]
        tensor_values = iter(values[split:])
        for p in params:
            if not isinstance(p, Tensor):
                arguments.append(np.float32(p))
            elif p.ndim == 0:
                arguments.append(next(tensor_values)[0])
            else:
                arguments.append(next(tensor_values))
        shared(self.kernel, layout.num_neurons, LINE, work, *arguments)
        for total, ranges in zip(sums, partial, strict=True):
            torch.sum(ranges, 0, out=total)
