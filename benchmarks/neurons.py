"""Neurons on one GPU against the roofline, against SpikingJelly, and against the clock.

    python -m benchmarks.neurons
    python -m benchmarks.neurons --rows lif custom

Groups of rows, each verified before it is timed:

- lif: LIF forward and backward, T = 128; "long" is T = 1024, "wide" T = 32 with 8M neurons
- inference: LIF without gradients, which may write nothing but spikes
- zoo: PLIF per channel, ALIF, current-based LIF, Izhikevich, T = 128
- custom: a user's neuron of two inputs, two states, two outputs, beside SpikingJelly's FlexSN
- layout: a channels-last input beside the same contiguous
- short, host: T = 4, and T = 1 with 32 neurons, where only the host's time counts

The roofline is the time in which this GPU copies the bytes that must move, measured in the same
row: inputs are read twice, outputs and gradients of inputs written, gradients of outputs read.
Without a GPU it is a trial of the scripts, on few neurons.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import spikefuse as sf
from benchmarks import gated, layer, lif, record, series
from benchmarks.layer import DTYPES
from benchmarks.runner import Clock, Contender, Copy, Settings, clock_for, first_line, measure

GROUPS = ("lif", "inference", "zoo", "custom", "layout", "long", "wide", "short", "host")
COPY_BYTES = 1 << 31
BARE = "bare autograd.Function"
CHANNELS_LAST = f"{layer.OURS}, channels-last"
MILLION = 1_000_000

# By group (and dtype): the least fraction of the roofline, in device time.
ROOFLINE = {
    ("lif", "float32"): 0.8,
    ("lif", "bfloat16"): 0.75,
    "long": 0.85,
    "wide": 0.85,
    "inference": 0.85,
    "zoo": 0.65,
    "custom": 0.6,
}
RIVAL_BAR, LAYOUT_BAR, SHORT_BAR_MS, HOST_BAR_US = 1.5, 0.05, 0.12, 120.0


@dataclass(frozen=True)
class Model:
    """A neuron, and what it is given: inputs uniform up to `high`.

    `exact`: whether it is made of operations that are rounded correctly everywhere.
    """

    make: Callable[[], sf.Neuron]
    exact: bool = True
    high: float = 1.0
    num_inputs: int = 1
    num_outputs: int = 1


def plif(channels: int) -> sf.Neuron:
    neuron = sf.PLIF(channels=channels)
    with torch.no_grad():  # each channel its own decay
        for logit in neuron.parameters():
            logit.copy_(torch.linspace(-1, 1, channels))
    return neuron


def models() -> dict[str, Model]:
    return {
        "LIF": Model(lif.neuron),
        "PLIF per channel": Model(partial(plif, 64)),
        "ALIF": Model(lambda: sf.ALIF()),
        "CubaLIF": Model(lambda: sf.CubaLIF(current_decay=0.5, decay=0.9), high=0.5),
        "Izhikevich": Model(lambda: sf.Izhikevich()),
        "two inputs, two outputs": Model(gated.Gated, False, num_inputs=2, num_outputs=2),
    }


@dataclass(frozen=True)
class Row:
    """One measurement: a model, its input `[T, B, ...]`, and which part of training."""

    group: str
    model: str
    shape: tuple[int, ...]
    dtype: str
    training: bool = True

    @property
    def title(self) -> str:
        neurons = torch.Size(self.shape[1:]).numel()
        size = f"{neurons / MILLION:.3g}M" if neurons >= MILLION else str(neurons)
        said = f"{self.model}, T={self.shape[0]}, {size} neurons, {self.dtype}"
        return said if self.training else f"{said}, inference"


def rows(groups: list[str], dtypes: list[str], quick: bool) -> Iterator[Row]:
    flat = (1, MILLION)
    picture = (16, 64, 32, 32)  # 1,048,576 neurons
    both = ("float32", "bfloat16")
    plan = [
        *(Row("lif", "LIF", (128, *flat), d) for d in both),
        Row("inference", "LIF", (128, *flat), "bfloat16", training=False),
        Row("inference", "LIF", (128, *flat), "float32", training=False),
        *(Row("zoo", "PLIF per channel", (128, *picture), d) for d in both),
        *(Row("zoo", m, (128, *flat), d) for m in ("ALIF", "CubaLIF", "Izhikevich") for d in both),
        Row("layout", "LIF", (32, 100, 64, 56, 56), "bfloat16"),
        *(Row("long", "LIF", (1024, *flat), d) for d in both),
        *(Row("wide", "LIF", (32, 1, 8 * MILLION), d) for d in both),
        Row("short", "LIF", (4, *flat), "float32"),
        Row("host", "LIF", (1, 1, 32), "float32"),
        # Last, because FlexSN takes minutes to choose its kernels.
        *(Row("custom", "two inputs, two outputs", (32, *flat), d) for d in reversed(both)),
    ]
    for row in plan:
        if row.group in groups and row.dtype in dtypes:
            yield replace(row, shape=small(row.shape)) if quick else row


def small(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape for trials; a model's channels stay."""
    if len(shape) == 3:
        return min(shape[0], 6), 1, min(shape[2], 300)
    return min(shape[0], 6), 2, shape[2], 3, 3


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = series.parser("neurons", __doc__, rounds=11, within=140.0)
    parser.add_argument("--rows", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="GROUP")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    return series.parse(parser, argv)


@dataclass(frozen=True)
class Plan:
    """What all rows of a run share."""

    device: torch.device
    clock: Clock
    copy: Copy
    turns: Settings


def main(argv: list[str] | None = None) -> Path:
    args = arguments(argv)
    device = torch.device(args.device)
    plan = Plan(
        device,
        clock_for(device),
        layer.large_copy(1 << 20 if args.quick else COPY_BYTES, device),
        Settings(args.rounds, slot_ms=0.5 if args.quick else 25.0),
    )
    planned = rows(args.rows, args.dtype, args.quick)
    return series.run(args, planned, partial(measure_one, plan), progress, bars)


def measure_one(plan: Plan, row: Row) -> dict[str, Any]:
    model, dtype = models()[row.model], DTYPES[row.dtype]
    sizes = model.num_inputs, model.num_outputs
    neuron = model.make().to(plan.device)
    inputs = layer.Inputs(row.shape, dtype, plan.device, *sizes, model.high)
    truth = layer.Truth.of(neuron, inputs, model.exact, row.training)
    others = [inputs.in_layout(torch.channels_last)] if row.group == "layout" else []

    def prepare() -> None:
        for one in (inputs, *others):
            one.prepare()

    def verify(contender: Contender, result: layer.Result) -> None:
        if contender.name == BARE:
            verify_bare(inputs, result)
        else:
            truth.verify(contender, result)

    measured = measure(
        [*contenders(row, neuron, inputs), *(layer.ours(neuron, o, CHANNELS_LAST) for o in others)],
        [plan.copy],
        verify,
        plan.clock,
        layer.bytes_to_move(inputs.like.numel(), dtype, *sizes, row.training),
        plan.turns,
        prepare,
    )
    return {
        "row": row.title,
        "group": row.group,
        "neuron": row.model,
        "shape": list(row.shape),
        "T": row.shape[0],
        "N": torch.Size(row.shape[1:]).numel(),
        "dtype": row.dtype,
        "training": row.training,
        "verified_neurons": truth.num_neurons,
        "input_bytes": inputs.num_bytes,
        "output_bytes": inputs.like.nbytes * model.num_outputs,
        "input_sets": len(inputs.sets),
    } | measured


def contenders(row: Row, neuron: sf.Neuron, inputs: layer.Inputs) -> list[Contender]:
    if not row.training:
        return [layer.inference(layer.OURS, neuron, inputs)]
    found = [layer.ours(neuron, inputs)]
    if row.group in ("lif", "short", "host"):
        found += lif.rivals(inputs)
    if row.group == "custom" and row.dtype == "float32":  # FlexSN's state has the input's dtype
        found.append(gated.rival(inputs))
    if row.group == "host":
        found.append(bare(inputs))
    return found


def bare(inputs: layer.Inputs) -> Contender:
    try:
        from benchmarks import host
    except ImportError as error:
        return Contender(BARE, unavailable=first_line(error))
    return host.bare(BARE, inputs)


def verify_bare(inputs: layer.Inputs, result: layer.Result) -> None:
    (x,), (grad,) = inputs.sets[0]
    assert torch.equal(result.outputs[0], x.detach()), "the output is not the input"
    assert torch.equal(result.grads[0], grad), "the gradient is not that of the output"


def progress(row: Row, found: dict[str, Any]) -> str:
    lines = [f": copy {found['copies'][0]['gb_per_s']:.0f} GB/s"]
    for c in found["contenders"]:
        if c["status"] != "ok":
            lines.append(f"{c['name']}: {c['status']}, {c['reason']}")
            continue
        kinds = [k for k in ("device_ms", "wall_ms") if k in c]
        times = [f"{k.replace('_', ' ')} {c[k]['median']:.4f}" for k in kinds]
        text = f"{c['name']}: {', '.join(times)}, {c['fraction'][kinds[0]]:.1%} of the roofline"
        if "peak_bytes" in c:
            text += f", {c['peak_bytes'] / 1e6:.1f} MB at the peak"
        lines.append(text)
    return "\n    ".join(lines)


def bars(row: Row, found: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The project's own bars for a row; what could not be measured is None, and missed."""
    right = {c["name"]: c for c in (found or {}).get("contenders", []) if c["status"] == "ok"}

    def median(name: str, kind: str = "device_ms") -> float | None:
        return right[name][kind]["median"] if name in right else None

    def over(one: float | None, other: float | None) -> float | None:
        return None if one is None or other is None else one / other

    ours, made = median(layer.OURS), []
    least = ROOFLINE.get(row.group, ROOFLINE.get((row.group, row.dtype)))
    if least is not None:
        share = right[layer.OURS]["fraction"]["device_ms"] if layer.OURS in right else None
        made.append(record.bar(f"{row.title}: of the roofline", share, least))
    if row.group == "custom" and row.dtype == "float32":
        faster = over(median(gated.RIVAL), ours)
        made.append(record.bar(f"{row.title}: times faster than FlexSN", faster, RIVAL_BAR))
    if row.group == "layout":
        ratio = over(median(CHANNELS_LAST), ours)
        apart = None if ratio is None else abs(ratio - 1)
        what = f"{row.title}: channels-last apart from contiguous"
        made.append(record.bar(what, apart, LAYOUT_BAR, at_least=False))
    if row.group == "inference":
        peak = right[layer.OURS]["peak_bytes"] if layer.OURS in right else None
        beyond = None if found is None or peak is None else peak - found["output_bytes"]
        made.append(record.bar(f"{row.title}: bytes beyond the spikes", beyond, 0, at_least=False))
    wall = median(layer.OURS, "wall_ms")
    if row.group == "short":
        made.append(record.bar(f"{row.title}: wall ms", wall, SHORT_BAR_MS, at_least=False))
    if row.group == "host":
        micros = None if wall is None else 1000 * wall
        made.append(record.bar(f"{row.title}: wall µs", micros, HOST_BAR_US, at_least=False))
    return made


if __name__ == "__main__":
    main()
