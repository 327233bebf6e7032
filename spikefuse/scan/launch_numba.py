"""Run generated Numba kernels on CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence
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
        self.streamed = size >= _STREAMED and layout.inner >= _MIN_ROW

    def __call__(
        self,
        sequences: Sequence[Tensor],
        states: Sequence[Tensor | None],
        sums: Sequence[Tensor | None],
        params: Sequence[float | Tensor],
    ) -> None:
        layout = self.layout
        tensors = filter(torch.is_tensor, params)
        values = arrays((*sequences, *states, *sums, *tensors), are_large=True)
        arguments: list[Any] = [layout.num_steps, layout.num_neurons, layout.inner, self.streamed]
        for memory, strides in zip(values, self.strides, strict=False):
            arguments += (memory, *strides)
        first, split = len(sequences), len(sequences) + len(states) + len(sums)
        arguments += values[first:split]
        tensor_values, has_channels = iter(values[split:]), False
        for p in params:
            if not isinstance(p, Tensor):
                arguments.append(np.float32(p))
            elif p.ndim == 0:
                arguments.append(next(tensor_values)[0])
            else:
                arguments.append(next(tensor_values))
                if not has_channels:
                    arguments.append(layout.channel_inner)
                has_channels = True
        work = layout.num_neurons * layout.num_steps
        shared(self.kernel, layout.num_neurons, LINE, work, *arguments)
