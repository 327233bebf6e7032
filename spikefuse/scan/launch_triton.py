"""Run generated Triton kernels on GPU tensors, or on CPU tensors in Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spikefuse.compiler.emit_triton import chunk
from spikefuse.kernels import bits_triton
from spikefuse.kernels.triton_runtime import TritonLaunch, multiprocessors
from spikefuse.scan.layout import Layout
from spikefuse.scan.program import Operands, Variant


class Shape(NamedTuple):
    """How work is divided: neighbouring neurons per thread, warps per thread block."""

    neurons: int
    warps: int

    @property
    def block(self) -> int:
        """Neurons per thread block."""
        return self.warps * 32 * self.neurons


# The fastest shapes measured on an H200: forward by the itemsize of the first input; ...
FORWARD = {2: Shape(4, 2), 4: Shape(2, 4)}
# ... of many neurons, so that a thread reads 16 bytes in half precision and packs whole bytes; ...
FORWARD_MANY, MANY = Shape(8, 2), 1 << 19
# ... backward, over at most SHORT steps in half precision, and over many steps with one block of
# neurons per program.
BACKWARD, BACKWARD_SHORT, BACKWARD_LONG = Shape(2, 4), Shape(4, 4), Shape(2, 2)
SHORT = 6
# Target number of programs per multiprocessor where each takes several blocks of neurons, and where
# each also writes sums.
PROGRAMS, SUMMING = 32, 24


def prepare(
    kernel: Any,
    layout: Layout,
    sequences: Sequence[Tensor],
    variant: Variant,
    by_channel: bool,
    has_sums: bool,
) -> TritonLaunch:
    """See `spikefuse.scan.program.Launcher`."""
    itemsize, device = sequences[0].itemsize, sequences[0].device
    walks = by_channel or (has_sums and _is_single(layout))
    flags: tuple[bool, ...] = (variant.repair,)
    if kernel.__name__ == "backward":
        shape = _backward_shape(layout, itemsize, walks)
        flags = variant.repair, variant.rebuild
    else:
        is_many = layout.num_neurons >= MANY and (variant.pack or itemsize == 2)
        shape = FORWARD_MANY if is_many else FORWARD[itemsize]
        if variant.pack:  # bits are unpacked in backward
            bits_triton.compile_unpack(sequences[-1])
    # A launch that limits registers may run twice, which a repair, an addition, must not.
    tight = shape is BACKWARD_LONG and itemsize == 2 and not variant.repair
    num = _num_programs(layout, shape, device, walks, has_sums)
    integers = (*_integers(layout, sequences, shape.block), *flags)
    return TritonLaunch(kernel, (num, 1, 1), integers, shape.warps, device, tight)


def sums_shape(
    layout: Layout, itemsize: int, device: torch.device, by_channel: bool
) -> tuple[tuple[int], torch.dtype]:
    """See `spikefuse.scan.program.Launcher`: each neuron of a program's block has a sum."""
    walks = by_channel or _is_single(layout)
    shape = _backward_shape(layout, itemsize, walks)
    num = _num_programs(layout, shape, device, walks, has_sums=True)
    return (min(layout.num_neurons, num * shape.block),), torch.float32


def _is_single(layout: Layout) -> bool:
    """Whether the sequence is one chunk."""
    return chunk(layout.num_steps) == layout.num_steps


def _backward_shape(layout: Layout, itemsize: int, walks: bool) -> Shape:
    if not walks and not _is_single(layout):
        return BACKWARD_LONG
    return BACKWARD_SHORT if itemsize == 2 and chunk(layout.num_steps) <= SHORT else BACKWARD


def _num_programs(
    layout: Layout, shape: Shape, device: torch.device, walks: bool, has_sums: bool
) -> int:
    """The number of programs: one for each block of neurons, or, if a program `walks` through
    several, as many as share them evenly and have the same channels in all their blocks."""
    blocks = -(-layout.num_neurons // shape.block)
    if not walks or not blocks:
        return blocks
    period = layout.channels * layout.channel_inner
    # The fewest programs that are a whole number of periods apart.
    fewest = period // math.gcd(period, shape.block)
    wanted = (SUMMING if has_sums else PROGRAMS) * multiprocessors(device)
    rounds = -(-blocks // max(fewest, wanted // fewest * fewest))
    return min(blocks, -(-blocks // (rounds * fewest)) * fewest)


def _integers(layout: Layout, sequences: Sequence[Tensor], block: int) -> tuple[int, ...]:
    """The kernel's integers and constants, in its order."""
    neurons, steps = layout.num_neurons, chunk(layout.num_steps)
    strides = [stride for x in sequences for stride in layout.strides(x)]
    counts = [*strides, neurons, layout.inner]
    unit = 1 if any(number % 16 for number in counts) else 16
    return (
        *(number // unit for number in counts),
        layout.num_steps,
        layout.channels,
        layout.channel_inner,
        block,
        steps,
        steps == layout.num_steps,
        layout.num_steps % steps > 0,
        layout.inner == neurons,
        unit,
    )


# Samples of a tile of a recurrent scan, the fewest that tensor cores multiply; the neurons and
# inputs of a tile where several programs share a head; warps.
TILE, PART, DEPTH, RECURRENT_WARPS = 16, 64, 64, 8
# Weights that a program holds in the shared memory of its multiprocessor.
RESIDENT_BYTES = 3 << 16
#: The number of bfloat16 pieces whose sum is a value of a dtype.
PIECES = {torch.float32: 3, torch.bfloat16: 1, torch.float16: 2}


def new_sums(like: Tensor, count: int) -> list[Tensor]:
    """See `spikefuse.scan.program.Launcher`."""
    shape = count, -(-like.shape[1] // TILE), like.shape[2]
    return [*torch.empty(shape, dtype=torch.float32, device=like.device)]


def pack(weight: Tensor, transposed: bool) -> Tensor:
    """See `spikefuse.scan.program.Launcher`: bfloat16 tensors whose sum is the weight, along a new
    first dim."""
    pieces = weight.new_empty((PIECES[weight.dtype], *weight.shape), dtype=torch.bfloat16)
    rest = weight
    for i, piece in enumerate(pieces):
        piece.copy_(rest)
        if i + 1 < len(pieces):
            rest = rest.float() - piece
    return pieces


def run_recurrent(kernel: Any, operands: Operands) -> None:
    """See `spikefuse.scan.program.Launcher`."""
    read, weight, start = operands.read, operands.weight, operands.start
    _, batch, neurons = read[0].shape
    (heads, width), device = weight.shape[:2], weight.device
    num_weights = PIECES[weight.dtype]
    if kernel.__name__ == "backward":
        # Gradients are float32. For weights in half precision, two pieces suffice.
        num_pieces, kind = max(num_weights, 2), torch.float32
    else:
        num_pieces, kind = 1 if operands.binary else num_weights, weight.dtype
    if start is None:
        start = torch.zeros((batch, neurons), dtype=kind, device=device)
    division = _division(weight)
    blocks = division[-1]
    tasks = -(-batch // TILE) * heads
    grid = min(tasks, multiprocessors(device) // blocks) if blocks > 1 else tasks, blocks, 1
    counters = torch.zeros(tasks, dtype=torch.int32, device=device)
    strides = [stride for x in read for stride in x.stride()[:2]]
    counts = (*strides, neurons, width)
    unit = 1 if any(number % 16 for number in counts) else 16
    integers = (
        *(number // unit for number in counts),
        *(len(read[0]), batch),
        *(TILE, *division, num_pieces, num_weights),
        *(_weight_bytes(weight, division) <= RESIDENT_BYTES, unit),
    )
    sequences = [operands.packed, start, *read, *operands.written]
    given = *sequences, *operands.params
    dtypes = tuple([x.dtype if isinstance(x, Tensor) else None for x in given])
    launch = _recurrent_launch(kernel, grid, integers, device, dtypes)
    launch(sequences, operands.steps, [*operands.sums, counters], operands.params)


def spike_product(grad: Tensor, spikes: Tensor, heads: int) -> None:
    """See `spikefuse.scan.program.Launcher`: tensor cores multiply faster."""


def _division(weight: Tensor) -> tuple[int, int, int, int]:
    """How a head is divided: BLOCK_N, BLOCK_K, TILES and BLOCKS.

    A program computes a whole head whose weights fit into shared memory. Otherwise the programs of
    a head wait for each other, so all programs must run at the same time: there are at most as many
    as multiprocessors.
    """
    width = weight.shape[1]
    padded = max(TILE, 1 << (width - 1).bit_length())
    whole = padded, padded, 1, 1
    if not weight.is_cuda or _weight_bytes(weight, whole) <= RESIDENT_BYTES:
        return whole
    columns = PART
    while -(-width // columns) > multiprocessors(weight.device):
        columns *= 2
    return columns, DEPTH, -(-width // DEPTH), -(-width // columns)


def _weight_bytes(weight: Tensor, division: tuple[int, int, int, int]) -> int:
    """Bytes of the weights that a program multiplies by."""
    columns, depth, tiles, _ = division
    return 2 * PIECES[weight.dtype] * columns * depth * tiles


@lru_cache(maxsize=512)
def _recurrent_launch(
    kernel: Any,
    grid: tuple[int, int, int],
    integers: tuple[int, ...],
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],
) -> TritonLaunch:
    """The launch of a kernel on tensors of these dtypes."""
    warps, waits = RECURRENT_WARPS, grid[1] > 1
    return TritonLaunch(kernel, grid, integers, warps, device, cooperative=waits)
