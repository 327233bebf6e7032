"""Neurons on one GPU against the roofline and against SpikingJelly.

    python -m benchmarks.neurons
    python -m benchmarks.neurons --rows lif custom

Groups of rows, each verified before it is timed:

- lif: LIF forward and backward, T = 128; "long" has T = 1024, "wide" T = 32 and 8M neurons
- inference: LIF without gradients, which may write nothing but spikes
- zoo: PLIF per channel, ALIF, current-based LIF, Izhikevich, T = 128
- custom: a user-defined neuron with two inputs and two outputs, beside SpikingJelly's FlexSN
- layout: a channels-last input beside the same contiguous
- short, host: T = 4, and T = 1 with 32 neurons, which are bound by the host

The roofline is the time in which this GPU copies the bytes that must move, measured in the same
row: inputs are read twice, outputs and gradients of inputs written, gradients of outputs read.
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
from benchmarks import layers, runner
from benchmarks.layers import DTYPES, OURS, Gated, Inputs, LayerInput, LayerTruth
from benchmarks.runner import Contender, Timing, measure

GROUPS = ("lif", "inference", "zoo", "custom", "layout", "long", "wide", "short", "host")
COPY_BYTES = 1 << 31  # many times the size of a GPU's cache
CHANNELS_LAST = f"{OURS}, channels-last"
MILLION = 1_000_000


@dataclass(frozen=True)
class Model:
    """A neuron and its input, uniform up to `high`.

    `exact`: whether it uses only operations that are correctly rounded everywhere.
    """

    make: Callable[[], sf.Neuron]
    exact: bool = True
    high: float = 1.0
    ports: int = 1


def plif() -> sf.Neuron:
    neuron = sf.PLIF(channels=64)
    with torch.no_grad():  # a different decay in each channel
        for logit in neuron.parameters():
            logit.copy_(torch.linspace(-1, 1, 64))
    return neuron


MODELS = {
    "LIF": Model(layers.lif),
    "PLIF per channel": Model(plif),
    "ALIF": Model(sf.ALIF),
    "CubaLIF": Model(lambda: sf.CubaLIF(current_decay=0.5, decay=0.9), high=0.5),
    "Izhikevich": Model(sf.Izhikevich),
    "two inputs, two outputs": Model(Gated, False, ports=2),
}


@dataclass(frozen=True)
class NeuronRow:
    """One measurement: a model, its input `[T, B, ...]`, training or inference."""

    group: str
    model: str
    shape: tuple[int, ...]
    dtype: str
    training: bool = True

    @property
    def title(self) -> str:
        neurons = torch.Size(self.shape[1:]).numel()
        size = f"{neurons / MILLION:.3g}M" if neurons >= MILLION else str(neurons)
        text = f"{self.model}, T={self.shape[0]}, {size} neurons, {self.dtype}"
        return text if self.training else f"{text}, inference"


def rows(args: argparse.Namespace) -> Iterator[NeuronRow]:
    flat, picture = (1, MILLION), (16, 64, 32, 32)
    both = ("float32", "bfloat16")
    zoo = (("PLIF per channel", picture), ("ALIF", flat), ("CubaLIF", flat), ("Izhikevich", flat))
    plan = [
        *(NeuronRow("lif", "LIF", (128, *flat), d) for d in both),
        *(NeuronRow("inference", "LIF", (128, *flat), d, training=False) for d in reversed(both)),
        *(NeuronRow("zoo", m, (128, *shape), d) for m, shape in zoo for d in both),
        NeuronRow("layout", "LIF", (32, 100, 64, 56, 56), "bfloat16"),
        *(NeuronRow("long", "LIF", (1024, *flat), d) for d in both),
        *(NeuronRow("wide", "LIF", (32, 1, 8 * MILLION), d) for d in both),
        NeuronRow("short", "LIF", (4, *flat), "float32"),
        NeuronRow("host", "LIF", (1, 1, 32), "float32"),
        # Last, because FlexSN tunes its kernels for minutes.
        *(NeuronRow("custom", "two inputs, two outputs", (32, *flat), d) for d in reversed(both)),
    ]
    for row in plan:
        if row.group in args.rows and row.dtype in args.dtype:
            yield replace(row, shape=small(row.shape)) if args.quick else row


def small(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape for quick runs; the number of channels stays."""
    if len(shape) == 3:
        return min(shape[0], 6), 1, min(shape[2], 300)
    return min(shape[0], 6), 2, shape[2], 3, 3


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("neurons", __doc__)
    parser.add_argument("--rows", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="GROUP")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    args = runner.parse(parser, argv)
    timing = Timing.of(args, COPY_BYTES)
    measure_row = partial(measure_neurons, timing, torch.device(args.device))
    return runner.run_rows(args, rows(args), measure_row)


def measure_neurons(timing: Timing, device: torch.device, row: NeuronRow) -> dict[str, Any]:
    model = MODELS[row.model]
    neuron = model.make().to(device)
    given = LayerInput(row.shape, DTYPES[row.dtype], device, model.ports, model.ports, model.high)
    inputs = Inputs(given)
    truth = LayerTruth(neuron, inputs, model.exact, row.training)
    chosen = contenders(row, neuron, inputs)
    prepared = [inputs]
    if row.group == "layout":
        prepared.append(inputs.in_layout(torch.channels_last))
        chosen.append(layers.ours(neuron, prepared[1], CHANNELS_LAST))

    def prepare() -> None:
        for one in prepared:
            one.prepare()

    about = {
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
        "output_bytes": inputs.like.nbytes * model.ports,
        "input_sets": len(inputs.sets),
    }
    num_bytes = inputs.bytes_to_move(row.training)
    return about | measure(chosen, truth.verify, timing, num_bytes, prepare)


def contenders(row: NeuronRow, neuron: sf.Neuron, inputs: Inputs) -> list[Contender]:
    if not row.training:
        return [layers.inference(OURS, neuron, inputs)]
    found = [layers.ours(neuron, inputs)]
    if row.group in ("lif", "short", "host"):
        found += layers.jelly_lif(inputs)
    if row.group == "custom" and row.dtype == "float32":  # FlexSN's state has the input's dtype
        assert isinstance(neuron, Gated)
        found.append(layers.flex(neuron, inputs))
    return found


if __name__ == "__main__":
    main()
