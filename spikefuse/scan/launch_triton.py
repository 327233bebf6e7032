"""Run generated Triton kernels on GPU tensors, or on CPU tensors in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from spikefuse.compiler.emit_triton import chunk
from spikefuse.kernels.triton_runtime import TritonLaunch
from spikefuse.scan.layout import Layout
from spikefuse.scan.program import Variant


class Shape(NamedTuple):
    """How work is divided: neighbouring neurons per thread, warps per thread block."""

    neurons: int
    warps: int


# By the itemsize of the first input: the fastest shapes measured for LIF on an H200, alone and
# behind a norm, from 50,000 to 20 million neurons.
FORWARD = {2: Shape(4, 2), 4: Shape(2, 4)}
BACKWARD = {2: Shape(2, 2), 4: Shape(2, 2)}
# In half precision, chunks of few steps leave registers for more neurons.
BACKWARD_SHORT, SHORT = Shape(4, 2), 6
# With packed spikes, a thread writes whole bytes if there are many neurons.
PACKING, MANY = Shape(8, 2), 1 << 20


def prepare(
    kernel: Any, layout: Layout, sequences: Sequence[Tensor], variant: Variant
) -> TritonLaunch:
    """See `spikefuse.scan.program.Launcher`."""
    itemsize, device = sequences[0].itemsize, sequences[0].device
    if kernel.__name__ == "backward":
        is_short = itemsize == 2 and chunk(layout.num_steps) <= SHORT
        shape = BACKWARD_SHORT if is_short else BACKWARD[itemsize]
        grid, integers = _geometry(layout, sequences, shape)
        # A launch that limits registers may run twice, which a repair, an addition, must not.
        tight = itemsize == 2 and not is_short and not variant.repair
        flags = variant.repair, variant.rebuild
        return TritonLaunch(kernel, grid, (*integers, *flags), shape.warps, device, tight)
    shape = PACKING if variant.pack and layout.num_neurons >= MANY else FORWARD[itemsize]
    grid, integers = _geometry(layout, sequences, shape)
    return TritonLaunch(kernel, grid, (*integers, variant.repair), shape.warps, device)


def _geometry(
    layout: Layout, sequences: Sequence[Tensor], shape: Shape
) -> tuple[tuple[int, int, int], tuple[int, ...]]:
    """The grid, and the kernel's integers and constants in its order."""
    neurons = layout.num_neurons
    strides = [stride for x in sequences for stride in layout.strides(x)]
    counts = [*strides, neurons, layout.inner]
    unit = 1 if any(number % 16 for number in counts) else 16
    block = shape.warps * 32 * shape.neurons
    integers = (
        *(number // unit for number in counts),
        layout.num_steps,
        layout.channels,
        layout.channel_inner,
        block,
        chunk(layout.num_steps),
        layout.inner == neurons,
        unit,
    )
    return (-(-neurons // block), 1, 1), integers
