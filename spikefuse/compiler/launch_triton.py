"""Run Triton kernels on GPU tensors, or on CPU tensors in Triton's interpreter."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from spikefuse.compiler.layout import Layout

# Bytes that a thread reads or writes at once, and threads per block.
ACCESS_BYTES = 16
NUM_WARPS = 4


def forward(
    module: ModuleType,
    layout: Layout,
    sequences: Sequence[Tensor],
    states: Sequence[Tensor | None],
    params: Sequence[float | Tensor],
) -> None:
    """Run the forward scan; outputs are among the sequences, in the order of the kernel."""
    _run(module.forward, layout, sequences, states, (), params)


def backward(
    module: ModuleType,
    layout: Layout,
    sequences: Sequence[Tensor],
    states: Sequence[Tensor | None],
    sums: Sequence[Tensor],
    params: Sequence[float | Tensor],
) -> None:
    """Run the backward scan; `sums` are the flat gradients of parameters, one per neuron."""
    _run(module.backward, layout, sequences, states, sums, params)


def _run(
    kernel: Any,
    layout: Layout,
    sequences: Sequence[Tensor],
    states: Sequence[Tensor | None],
    sums: Sequence[Tensor],
    params: Sequence[float | Tensor],
) -> None:
    neurons = layout.num_neurons
    integers = [stride for x in sequences for stride in layout.strides(x)]
    integers += [neurons, layout.inner]
    unit = 1 if any(number % 16 for number in integers) else 16
    block = NUM_WARPS * 32 * ACCESS_BYTES // min(x.element_size() for x in sequences)
    with _on_device_of(sequences[0]):
        kernel[(-(-neurons // block),)](
            *sequences,
            *states,
            *sums,
            *params,
            *(number // unit for number in integers),
            layout.num_steps,
            layout.channels,
            layout.channel_inner,
            BLOCK=block,
            FLAT=layout.inner == neurons,
            UNIT=unit,
            num_warps=NUM_WARPS,
            # Contracted multiply-adds would change spikes.
            enable_fp_fusion=False,
        )


def _on_device_of(x: Tensor) -> contextlib.AbstractContextManager[None]:
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"
