"""Batch norm and LIF neurons as one block on one GPU, against the roofline and SpikingJelly.

    python -m benchmarks.block
    python -m benchmarks.block --rows large --dtype bfloat16 --profile

Forward and backward in training: gradients of the input and of the norm's weight and bias. "large"
is a layer of 64 channels at 56 x 56, T = 32, batch 100, channels-last and contiguous; "late" is one
of 512 channels at 4 x 4. The rivals are torch's batch norm followed by our neuron, and by
SpikingJelly's function with a float32 state, on a view of the norm's result.

The roofline is the time in which this GPU copies the bytes that must move, measured in the same
row: x is read for the statistics, by forward, and by each of two backward passes; the gradient of
the output is read by these two; the output and the gradient of x are written.

Neurons that come near the threshold have no loss; all others must spike as in float64, and the
gradients are held to those in float64. `--profile` adds what each kernel takes. Without a GPU it
is a trial of the script, on few neurons.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import layer, lif, record, series, steps
from benchmarks.agreement import ROUNDING, apart
from benchmarks.layer import DTYPES, Inputs, Result
from benchmarks.neurons import COPY_BYTES, Plan, progress
from benchmarks.runner import Contender, Settings, clock_for, first_line, kernel_times, measure
from spikefuse.block.block import Block
from spikefuse.testing import within_budget

SHAPES = {"large": (32, 100, 64, 56, 56), "late": (32, 100, 512, 4, 4)}
TRIAL = (4, 3, 4, 5, 5)
LAYOUTS = {"channels-last": torch.channels_last, "contiguous": torch.contiguous_format}
AGAIN = f"{layer.OURS}, states computed again"
TWO = f"batch norm, then {layer.OURS}"
RIVAL = f"batch norm, then {lif.RIVAL_FUNCTION}"

# Sequences that must be read or written; see above.
SEQUENCES = 8
ROOFLINE, FASTER = 0.75, 1.8
JUDGED = ("large", "bfloat16", "channels-last")
# Thresholds so much higher and lower turn no spike of a neuron that stays away from its own. In
# bfloat16 the rivals round what the norm gives.
MARGIN = {"float32": 1e-4, "bfloat16": 1e-2}
# Neurons may be that near at most, as a share of all.
MAX_NEAR = 0.3
KERNELS = ("statistics", "forward", "first pass", "sums", "second pass")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = series.parser("block", __doc__, rounds=11, within=140.0)
    parser.add_argument("--rows", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="ROW")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16", "float32"])
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--profile", action="store_true", help="also what each kernel takes")
    return series.parse(parser, argv)


@dataclass(frozen=True)
class Row:
    """One measurement."""

    shape_name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str

    @property
    def title(self) -> str:
        return f"{self.shape_name} {list(self.shape)}, {self.dtype}, {self.layout}"


def rows(args: argparse.Namespace) -> Iterator[Row]:
    for name in args.rows:
        for layout in args.layout:
            for dtype in args.dtype:
                yield Row(name, TRIAL if args.quick else SHAPES[name], dtype, layout)


def main(argv: list[str] | None = None) -> Path:
    args = arguments(argv)
    device = torch.device(args.device)
    plan = Plan(
        device,
        clock_for(device),
        layer.large_copy(1 << 20 if args.quick else COPY_BYTES, device),
        Settings(args.rounds, slot_ms=0.5 if args.quick else 25.0),
    )
    return series.run(args, rows(args), partial(measure_one, plan, args.profile), progress, bars)


def measure_one(plan: Plan, profile: bool, row: Row) -> dict[str, Any]:
    dtype = DTYPES[row.dtype]
    inputs = Inputs(row.shape, dtype, plan.device).in_layout(LAYOUTS[row.layout])
    norm = make_norm(row.shape[2], plan.device)
    truth = Truth.of(norm, inputs, row.dtype)
    ours = contender(layer.OURS, norm, inputs, Block(norm, lif.neuron(), sf.memory.Bits()))
    measured = measure(
        [
            ours,
            contender(AGAIN, norm, inputs, Block(norm, lif.neuron(), sf.memory.Recompute())),
            contender(TWO, norm, inputs, partial(in_turn, norm, lif.neuron())),
            rival(norm, inputs),
        ],
        [plan.copy],
        truth.verify,
        plan.clock,
        SEQUENCES * inputs.like.nbytes,
        plan.turns,
        inputs.prepare,
    )
    return {
        "row": row.title,
        "shape_name": row.shape_name,
        "shape": list(row.shape),
        "dtype": row.dtype,
        "layout": row.layout,
        "verified_channels": len(truth.channels),
        "near": float(f"{truth.near_share:.3g}"),
        "input_bytes": inputs.num_bytes,
        "kernels": kernels(ours, plan.device) if profile else [],
    } | measured


def make_norm(channels: int, device: torch.device) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, device=device)
    with torch.no_grad():  # each channel its own
        norm.weight.copy_(torch.linspace(0.5, 1.5, channels))
        norm.bias.copy_(torch.linspace(-0.5, 0.5, channels))
    return norm


def contender(
    name: str, norm: nn.Module, inputs: Inputs, function: Callable[[Tensor], Tensor]
) -> Contender:
    return layer.contender(name, function, inputs, params=tuple(norm.parameters()))


def in_turn(norm: nn.Module, neuron: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return neuron(norm(x.flatten(0, 1)).unflatten(0, x.shape[:2]))


def rival(norm: nn.Module, inputs: Inputs) -> Contender:
    try:
        functional, _, surrogates = lif.spikingjelly()
    except Exception as error:  # whatever it is: the reason is the result
        return Contender(RIVAL, unavailable=first_line(error))
    constants = lif.constants(surrogates.Sigmoid(alpha=lif.WIDTH))

    def function(x: Tensor, rest: Tensor) -> Tensor:
        return functional.lif_multi_step(x, rest, **constants)[0]

    steps_of = steps.JellyFunction(inputs.like.shape[0], function)

    def neuron(x: Tensor) -> Tensor:
        return steps_of(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    made = contender(RIVAL, norm, inputs, partial(in_turn, norm, neuron))
    made.note = lif.implementation(functional, inputs.like.device)
    return made


@dataclass
class Truth:
    """Results for the first set of inputs: by the eager loop, and in float64.

    Norms treat channels on their own, so of long sequences the first and the last are verified.
    """

    channels: list[int]
    near: Tensor  # [1, B, channels, ...]: has no loss
    expected: Result
    true: Result
    rounding: float

    @classmethod
    def of(cls, norm: nn.BatchNorm2d, inputs: Inputs, dtype: str) -> Truth:
        (x,), (grad,) = inputs.sets[0]
        every = list(range(x.shape[2]))
        half = max(1, layer.VERIFIED_ELEMENTS * len(every) // x.numel() // 2)
        channels = every if 2 * half >= len(every) else every[:half] + every[-half:]
        share = max(1, layer.CHUNK_ELEMENTS[x.device.type] * len(every) // x.numel())
        parts = []
        for start in range(0, len(channels), share):
            chosen = channels[start : start + share]
            part = sliced(norm, chosen)
            xs, grads = x.detach()[:, :, chosen], grad[:, :, chosen]
            near = comes_near(part, xs, MARGIN[dtype])
            grads = torch.where(near, 0, grads)
            grad[:, :, chosen] = grads
            parts.append((near, eager(part, xs, grads), eager(part, xs.double(), grads)))
        near = torch.cat([part[0] for part in parts], 2)
        joined = [_joined([part[i] for part in parts]) for i in (1, 2)]
        return cls(channels, near, *joined, ROUNDING[dtype])

    @property
    def near_share(self) -> float:
        return self.near.float().mean().item()

    def verify(self, contender: Contender, result: Result) -> None:
        """Hold a result to float64: ours value by value, to the error of the eager loop in the
        same dtype; the others', which round what the norm gives, as a whole.

        Raises:
            AssertionError: what differs.
        """
        assert self.near_share <= MAX_NEAR, f"{self.near_share:.2g} of the neurons have no loss"
        (y,), (gx,) = result.outputs, result.grads
        assert y.isfinite().all(), "the output is not finite"
        assert gx.isfinite().all(), "the gradient is not finite"
        found = (y[:, :, self.channels], gx[:, :, self.channels],
                 *(g[self.channels] for g in result.params))  # fmt: skip
        wrong = ((found[0] != self.true.outputs[0]) & ~self.near).sum().item()
        assert wrong == 0, f"{wrong} spikes differ of neurons that stay away from the threshold"
        names = ("gradient of x", "gradient of the weight", "gradient of the bias")
        expected, true = ((*r.grads, *r.params) for r in (self.expected, self.true))
        size = true[0].double().norm().item()  # of terms that cancel in the parameters' sums
        for name, a, e, t in zip(names, found[1:], expected, true, strict=True):
            if contender.name == layer.OURS:
                within_budget(name, a, e, t, 8.0, 0.0 if a is found[1] else size)
            error = apart([a], [t])
            assert error <= self.rounding, (
                f"{name} differs by {error:.3g} of its size, allowed is {self.rounding:g}"
            )


def sliced(norm: nn.BatchNorm2d, channels: list[int]) -> nn.BatchNorm2d:
    made = nn.BatchNorm2d(len(channels), device=norm.weight.device)
    with torch.no_grad():
        made.weight.copy_(norm.weight[channels])
        made.bias.copy_(norm.bias[channels])
    return made


def comes_near(norm: nn.BatchNorm2d, x: Tensor, margin: float) -> Tensor:
    """Neurons `[1, B, C, ...]` that a slightly different threshold would make spike otherwise.

    While two thresholds around a third give the same spikes, no potential lies between them.
    """
    spikes = []
    for factor in (1 - margin, 1 + margin):
        neuron = sf.LIF(lif.DECAY, lif.THRESHOLD * factor)
        with torch.no_grad():
            spikes.append(Block(norm, neuron)(x.double(), impl="reference"))
    return (spikes[0] != spikes[1]).any(0, keepdim=True)


def eager(norm: nn.BatchNorm2d, x: Tensor, grad: Tensor) -> Result:
    leaf = x.detach().requires_grad_()
    y = Block(norm, lif.neuron())(leaf, impl="reference")
    gx, *params = torch.autograd.grad(y, (leaf, *norm.parameters()), grad.to(y.dtype))
    return Result((y.detach(),), (gx,), tuple(params))


def _joined(results: list[Result]) -> Result:
    def cat(parts: list[layer.Tensors], dim: int) -> layer.Tensors:
        return tuple(torch.cat(p, dim) for p in zip(*parts, strict=True))

    return Result(
        cat([r.outputs for r in results], 2),
        cat([r.grads for r in results], 2),
        cat([r.params for r in results], 0),
    )


def kernels(contender: Contender, device: torch.device) -> list[dict[str, Any]]:
    """What each kernel of a run takes, in order; called by its part of the block if they are five.
    None without a GPU."""
    assert contender.run is not None
    found = kernel_times(contender.run, device)
    parts = KERNELS if len(found) == len(KERNELS) else ("",) * len(found)
    return [
        {"part": part, "kernel": name, "us": round(micros, 2)}
        for part, (name, micros) in zip(parts, found, strict=True)
    ]


def bars(row: Row, found: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The project's own bars for a row; what could not be measured is None, and missed."""
    if (row.shape_name, row.dtype, row.layout) != JUDGED:
        return []
    right = {c["name"]: c for c in (found or {}).get("contenders", []) if c["status"] == "ok"}
    share = faster = None
    if layer.OURS in right:
        ours = right[layer.OURS]
        share = ours["fraction"]["device_ms"]
        if RIVAL in right:
            faster = right[RIVAL]["device_ms"]["median"] / ours["device_ms"]["median"]
    return [
        record.bar(f"{row.title}: of the roofline", share, ROOFLINE),
        record.bar(f"{row.title}: times faster than {RIVAL}", faster, FASTER),
    ]


if __name__ == "__main__":
    main()
