"""Run Numba kernels on CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from spikefuse.compiler.layout import Layout
from spikefuse.compiler.numba_runtime import advise_huge_pages, flat, parallel

_ABSENT = np.empty(0, np.float32)


def run(
    kernel: Any,
    layout: Layout,
    sequences: Sequence[Tensor],
    states: Sequence[Tensor | None],
    sums: Sequence[Tensor],
    params: Sequence[float | Tensor],
) -> None:
    """Run a kernel; see `spikefuse.compiler.program.Launcher`."""
    arguments: list[Any] = [layout.num_steps, layout.num_neurons, layout.inner]
    for x in sequences:
        advise_huge_pages(x)
        arguments += [flat(x), *layout.strides(x)]
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
    parallel(kernel, layout.num_neurons, layout.num_steps, *arguments)
