"""Run generated Numba kernels on CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from spikefuse.kernels.numba_runtime import advise_huge_pages, flat
from spikefuse.kernels.numba_threads import parallel
from spikefuse.scan.layout import Layout
from spikefuse.scan.program import Variant

_ABSENT = np.empty(0, np.float32)

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
        arguments: list[Any] = [layout.num_steps, layout.num_neurons, layout.inner, self.streamed]
        for x, strides in zip(sequences, self.strides, strict=True):
            advise_huge_pages(x)
            arguments += (flat(x), *strides)
        arguments += [_ABSENT if s is None else flat(s) for s in (*states, *sums)]
        has_channels = False
        for p in params:
            if isinstance(p, Tensor) and p.ndim == 1:
                arguments.append(flat(p))
                if not has_channels:
                    arguments.append(layout.channel_inner)
                has_channels = True
            else:
                arguments.append(np.float32(p.item() if isinstance(p, Tensor) else p))
        parallel(self.kernel, layout.num_neurons, layout.num_steps, *arguments)
