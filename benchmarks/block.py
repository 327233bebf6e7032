"""Batch norm and LIF neurons as one block on one GPU, against the roofline and SpikingJelly.

    python -m benchmarks.block
    python -m benchmarks.block --dtype bfloat16 --layout contiguous --shapes T=4

Forward and backward in training. The block is compared with torch's batch norm followed by our
neuron, and by SpikingJelly's function with a float32 state on a view of its result. The roofline is
the time in which this GPU copies the bytes that must move (see docs/benchmarks.md).

Neurons whose potential comes near the threshold are excluded from the loss. All others must spike
as in float64, and gradients are compared with those in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import layers, runner
from benchmarks.agreement import ROUNDING, difference
from benchmarks.layers import (
    DTYPES,
    JELLY_FUNCTION,
    OURS,
    Inputs,
    Jelly,
    JellyFunction,
    LayerResult,
)
from benchmarks.neurons import COPY_BYTES
from benchmarks.runner import Contender, Record, Timing, first_line, measure
from spikefuse.nn import Block
from spikefuse.testing import within_budget

SHAPES = {"large": (32, 100, 64, 56, 56)}
SHAPES |= {f"T={T}": (T, 1024 // T, 64, 32, 32) for T in (1, 4, 8, 32)}
QUICK = (4, 3, 4, 5, 5)
LAYOUTS = {"channels-last": torch.channels_last, "contiguous": torch.contiguous_format}
RECOMPUTED = f"{OURS}, recomputed states"
SEPARATE = f"batch norm, then {OURS}"
RIVAL = f"batch norm, then {JELLY_FUNCTION}"

SEQUENCES = 8  # that must be read or written: six reads and two writes
# Relative distance from the threshold below which a neuron is excluded. In bfloat16, contenders
# with a separate norm round its result.
MARGIN = {"float32": 1e-4, "bfloat16": 1e-2}
MAX_NEAR = 0.3  # largest share of such neurons


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("block", __doc__)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16", "float32"])
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    args = runner.parse(parser, argv)
    timing, device = Timing.of(args, COPY_BYTES), torch.device(args.device)

    return runner.run_cases(args, (
        (f"{shape}, {dtype}, {layout}",
         partial(measure_block, timing, QUICK if args.quick else SHAPES[shape], device, dtype,
                 layout))
        for layout in args.layout
        for shape in args.shapes
        for dtype in args.dtype
    ))  # fmt: skip


def measure_block(
    timing: Timing, shape: tuple[int, ...], device: torch.device, dtype: str, layout: str
) -> Record:
    inputs = Inputs(shape, DTYPES[dtype], device).in_layout(LAYOUTS[layout])
    norm = make_norm(shape[2], device)
    truth = BlockTruth(norm, inputs, dtype)
    blocks: dict[str, Callable[[Tensor], Tensor]] = {
        OURS: Block(norm, layers.lif(), sf.memory.Bits()),
        RECOMPUTED: Block(norm, layers.lif(), sf.memory.Recompute()),
        SEPARATE: partial(norm_then, norm, layers.lif()),
    }
    contenders = [block_contender(name, norm, inputs, block) for name, block in blocks.items()]
    contenders.append(rival(norm, inputs))
    about = {"shape": list(shape), "dtype": dtype, "layout": layout}
    num_bytes = SEQUENCES * inputs.like.nbytes
    return about | measure(contenders, truth.verify, timing, num_bytes, inputs.prepare)


def make_norm(channels: int, device: torch.device) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, device=device)
    with torch.no_grad():  # different values in each channel
        norm.weight.copy_(torch.linspace(0.5, 1.5, channels))
        norm.bias.copy_(torch.linspace(-0.5, 0.5, channels))
    return norm


def block_contender(
    name: str, norm: nn.Module, inputs: Inputs, function: Callable[[Tensor], Tensor]
) -> Contender:
    return layers.trained(name, function, inputs, tuple(norm.parameters()))


def norm_then(norm: nn.Module, neuron: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return neuron(norm(x.flatten(0, 1)).unflatten(0, x.shape[:2]))


def rival(norm: nn.Module, inputs: Inputs) -> Contender:
    try:
        jelly = Jelly(inputs.like.device)
    except Exception as error:
        return Contender(RIVAL, unavailable=first_line(error))
    folded = JellyFunction(len(inputs.like), jelly.function)

    def function(x: Tensor) -> Tensor:
        return folded(norm(x.flatten(0, 1))).unflatten(0, x.shape[:2])

    return block_contender(RIVAL, norm, inputs, function)


class BlockTruth:
    """Results for the first set of inputs by the reference, in the inputs' dtype and in float64.

    Channels are independent, so only the first and last channels of large inputs are verified.
    Neurons near the threshold are excluded: their gradients in the first set are set to 0.
    """

    def __init__(self, norm: nn.BatchNorm2d, inputs: Inputs, dtype: str) -> None:
        (x,), (grad,) = inputs.sets[0]
        self.rounding = ROUNDING[dtype]
        ends = layers.ends(x, 2)
        self.channels = torch.arange(x.shape[2])
        self.channels = torch.cat([self.channels[end[2]] for end in ends]).to(x.device)
        norm = sliced(norm, self.channels)
        xs, grads = x.detach()[:, :, self.channels], grad[:, :, self.channels]
        self.near = near_threshold(norm, xs, MARGIN[dtype])
        grads = torch.where(self.near, 0, grads)
        grad[:, :, self.channels] = grads
        self.expected = reference_block(norm, xs, grads)
        self.true = reference_block(norm, xs.double(), grads)

    def verify(self, contender: Contender, result: LayerResult) -> None:
        """Check a result against float64.

        The reference's error in the same dtype bounds the error of each value of our gradients.
        The other contenders round the result of the norm; their gradients are compared by norm.

        Raises:
            AssertionError: the result is wrong.
        """
        share = self.near.float().mean().item()
        assert share <= MAX_NEAR, f"{share:.2g} of the neurons come near the threshold"
        (y,), (gx,) = result.outputs, result.grads
        assert y.isfinite().all(), "the output is not finite"
        assert gx.isfinite().all(), "the gradient is not finite"
        y, gx = y[:, :, self.channels], gx[:, :, self.channels]
        wrong = ((y != self.true.outputs[0]) & ~self.near).sum().item()
        assert wrong == 0, f"{wrong} spikes differ in neurons that stay away from the threshold"
        found = (gx, *(g[self.channels] for g in result.params))
        names = ("gradient of x", "gradient of the weight", "gradient of the bias")
        expected, true = ((*r.grads, *r.params) for r in (self.expected, self.true))
        size = true[0].double().norm().item()  # of the terms in the sums over neurons, which cancel
        for name, a, e, t in zip(names, found, expected, true, strict=True):
            if contender.name == OURS:
                within_budget(name, (a, e, t), 8.0, 0.0 if a is gx else size)
            error = difference([a], [t])
            assert error <= self.rounding, (
                f"{name} differs by {error:.3g} of its norm, allowed is {self.rounding:g}"
            )


def sliced(norm: nn.BatchNorm2d, channels: Tensor) -> nn.BatchNorm2d:
    made = nn.BatchNorm2d(len(channels), device=norm.weight.device)
    with torch.no_grad():
        made.weight.copy_(norm.weight[channels])
        made.bias.copy_(norm.bias[channels])
    return made


def near_threshold(norm: nn.BatchNorm2d, x: Tensor, margin: float) -> Tensor:
    """Return the neurons `[1, B, C, ...]` that spike differently if the threshold is a little
    lower and a little higher; all other potentials stay outside of this range."""
    spikes = []
    for factor in (1 - margin, 1 + margin):
        block = Block(norm, sf.LIF(layers.DECAY, layers.THRESHOLD * factor))
        with torch.no_grad():
            spikes.append(block(x.double(), impl="reference"))
    return (spikes[0] != spikes[1]).any(0, keepdim=True)


def reference_block(norm: nn.BatchNorm2d, x: Tensor, grad: Tensor) -> LayerResult:
    leaf = x.detach().requires_grad_()
    y = Block(norm, layers.lif())(leaf, impl="reference")
    gx, *params = torch.autograd.grad(y, (leaf, *norm.parameters()), grad.to(y.dtype))
    return LayerResult((y.detach(),), (gx,), tuple(params))


if __name__ == "__main__":
    main()
