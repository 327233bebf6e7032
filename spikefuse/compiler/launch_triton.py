"""Run Triton kernels on GPU tensors, or on CPU tensors in Triton's interpreter."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spikefuse.compiler.layout import Layout

# Neighbouring neurons of a thread, and threads per block over 32. Measured on an H200 over
# {1, 2, 4, 8} and {1, 2, 4, 8}: wider accesses cost more registers than they save instructions.
THREAD_NEURONS = 2
NUM_WARPS = 4


def run(
    kernel: Any,
    layout: Layout,
    sequences: Sequence[Tensor],
    states: Sequence[Tensor | None],
    sums: Sequence[Tensor],
    params: Sequence[float | Tensor],
) -> None:
    """Run a kernel; see `spikefuse.compiler.program.Launcher`."""
    tensors = [*sequences, *states, *sums, *params]
    # Everything that Triton's own dispatch would look at, so that a call seen before skips it.
    key = (
        kernel,
        sequences[0].device,
        *((x.dtype, x.stride()) for x in sequences),
        *(x.data_ptr() % 16 if isinstance(x, Tensor) else x is None for x in tensors),
    )
    known = layout.launches.get(key)
    with _surroundings(sequences[0]):
        if known is not None:
            compiled, grid, integers = known
            compiled[grid](*tensors, *integers)
            return
        grid, integers = _geometry(layout, sequences)
        compiled = kernel[grid](
            *tensors,
            *integers,
            num_warps=NUM_WARPS,
            # Contracted multiply-adds would change spikes.
            enable_fp_fusion=False,
        )
    if compiled is not None:  # the interpreter compiles nothing
        layout.launches[key] = compiled, grid, integers


def _geometry(
    layout: Layout, sequences: Sequence[Tensor]
) -> tuple[tuple[int, int, int], tuple[int, ...]]:
    """The grid, and the kernel's integers and constants in its order."""
    neurons = layout.num_neurons
    strides = [stride for x in sequences for stride in layout.strides(x)]
    counts = [*strides, neurons, layout.inner]
    unit = 1 if any(number % 16 for number in counts) else 16
    block = NUM_WARPS * 32 * THREAD_NEURONS
    integers = (
        *(number // unit for number in counts),
        layout.num_steps,
        layout.channels,
        layout.channel_inner,
        block,
        layout.inner == neurons,
        unit,
    )
    return (-(-neurons // block), 1, 1), integers


_HERE = contextlib.nullcontext()


def _surroundings(x: Tensor) -> contextlib.AbstractContextManager[None]:
    if x.device.type == "cpu":
        # The interpreter computes in NumPy; like a GPU, it has nothing to say of infinities.
        return np.errstate(all="ignore")
    if x.device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(x.device)


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"
