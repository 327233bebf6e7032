"""One layer of neurons: over time steps, models and sizes on a GPU, and on a CPU.

    python -m benchmarks.neurons                    models and sizes, on a GPU
    python -m benchmarks.neurons models --groups lif custom
    python -m benchmarks.neurons steps              time and memory of a LIF layer over T

steps is Fig. 5 of "Towards Scalable GPU-Accelerated SNN Training via Temporal Fusion" for one layer
of 1,000,000 LIF neurons, with the eager loop (up to T = 64) and torch.compile (up to T = 32).

The roofline is the time in which the machine copies the bytes that must move, measured in the same
row: inputs are read twice, outputs and gradients of inputs written, gradients of outputs read.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import spikefuse as sf
from benchmarks import layers, plots, runner
from benchmarks.layers import COMPILED, DTYPES, LOOP, OURS, Gated, Inputs, LayerTruth
from benchmarks.runner import Contender, Record, Timing, measure

GROUPS = ("lif", "inference", "zoo", "custom", "layout", "long", "wide", "short", "host")
COPY_BYTES = 1 << 31  # many times the size of a GPU's cache
CHANNELS_LAST = f"{OURS}, channels-last"
MILLION = 1_000_000
STEPS = tuple(1 << i for i in range(11))
LARGEST_T = {LOOP: 64, COMPILED: 32}

Cases = Iterator[tuple[str, Callable[[], Record]]]


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("neurons", __doc__)
    parser.add_argument("what", nargs="?", choices=MEASUREMENTS, default="models")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS),
                        metavar="GROUP", help="groups of models (all)")  # fmt: skip
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--T", type=int, nargs="+", help="of steps (1 2 ... 1024)")
    parser.add_argument("--N", type=int, help="neurons of steps (1,000,000)")
    args = runner.parse(parser, argv)
    args.N = args.N or (1000 if args.quick else MILLION)
    args.name, cases, plot = MEASUREMENTS[args.what]
    return runner.run_cases(args, cases(args), plot=plot)


# Models and sizes


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


def model_cases(args: argparse.Namespace) -> Cases:
    flat, picture, both = (1, MILLION), (16, 64, 32, 32), ("float32", "bfloat16")
    zoo = (("PLIF per channel", picture), ("ALIF", flat), ("CubaLIF", flat), ("Izhikevich", flat))
    # Group, model, shape and dtypes.
    plan: list[tuple[str, str, tuple[int, ...], tuple[str, ...]]] = [
        ("lif", "LIF", (128, *flat), both),
        ("inference", "LIF", (128, *flat), both[::-1]),
        *(("zoo", model, (128, *shape), both) for model, shape in zoo),
        ("layout", "LIF", (32, 100, 64, 56, 56), ("bfloat16",)),
        ("long", "LIF", (1024, *flat), both),
        ("wide", "LIF", (32, 1, 8 * MILLION), both),
        ("short", "LIF", (4, *flat), ("float32",)),
        ("host", "LIF", (1, 1, 32), ("float32",)),
        # Last, because FlexSN tunes its kernels for minutes.
        ("custom", "two inputs, two outputs", (32, *flat), both[::-1]),
    ]
    timing, device = Timing.of(args, COPY_BYTES), torch.device(args.device)
    for group, model, shape, dtypes in plan:
        for dtype in dtypes:
            if group in args.groups and dtype in args.dtype:
                chosen = small(shape) if args.quick else shape
                title = f"{group}: {model}, {list(chosen)}, {dtype}"
                yield title, partial(measure_model, timing, device, group, model, chosen, dtype)


def small(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape for quick runs with the same number of channels."""
    if len(shape) == 3:
        return min(shape[0], 6), 1, min(shape[2], 300)
    return min(shape[0], 6), 2, shape[2], 3, 3


def measure_model(
    timing: Timing, device: torch.device, group: str, name: str, shape: tuple[int, ...], dtype: str
) -> Record:
    model, training = MODELS[name], group != "inference"
    neuron = model.make().to(device)
    inputs = Inputs(shape, DTYPES[dtype], device, model.ports, model.high)
    truth, prepared = LayerTruth(neuron, inputs, model.exact, training), [inputs]
    first = layers.ours(neuron, inputs) if training else layers.inference(OURS, neuron, inputs)
    chosen = [first]
    if group in ("lif", "short", "host"):
        chosen += layers.jelly_lif(inputs)
    if group == "custom" and dtype == "float32":  # FlexSN's state has the input's dtype
        assert isinstance(neuron, Gated)
        chosen.append(layers.flex(neuron, inputs))
    if group == "layout":
        prepared.append(inputs.in_layout(torch.channels_last))
        chosen.append(layers.ours(neuron, prepared[1], CHANNELS_LAST))

    def prepare() -> None:
        for one in prepared:
            one.prepare()

    about = {"group": group, "neuron": name, "T": shape[0], "N": torch.Size(shape[1:]).numel()}
    about |= {"dtype": dtype, "training": training}
    about["output_bytes"] = inputs.like.nbytes * model.ports
    num_bytes = inputs.bytes_to_move(training)
    return about | measure(chosen, truth.verify, timing, num_bytes, prepare)


# Time steps


def step_cases(args: argparse.Namespace) -> Cases:
    timing = Timing.of(args, COPY_BYTES)
    for dtype in args.dtype:
        for T in args.T or ([2, 4] if args.quick else STEPS):
            yield f"T={T}, {dtype}", partial(measure_steps, args, timing, T, dtype)


def measure_steps(args: argparse.Namespace, timing: Timing, T: int, dtype: str) -> Record:
    inputs = Inputs((T, 1, args.N), DTYPES[dtype], torch.device(args.device))
    neuron = layers.lif()
    truth = LayerTruth(neuron, inputs)
    chosen = [layers.ours(neuron, inputs), *layers.jelly_lif(inputs)]
    for name, make in ((LOOP, partial(layers.eager_loop, neuron)), (COMPILED, layers.compiled)):
        largest = 0 if args.quick and name == COMPILED else LARGEST_T[name]
        reason = f"measured up to T = {largest} only"
        chosen.append(make(inputs) if largest >= T else Contender(name, unavailable=reason))
    about = {"T": T, "N": args.N, "dtype": dtype, "input_bytes": inputs.num_bytes}
    return about | measure(chosen, truth.verify, timing, inputs.bytes_to_move(), inputs.prepare)


# By command: the name of the result, its cases and its plot.
MEASUREMENTS: dict[str, tuple[str, Callable[[argparse.Namespace], Cases], Callable | None]] = {
    "models": ("neurons", model_cases, None),
    "steps": ("timestep_scaling", step_cases, plots.timestep_scaling),
}


if __name__ == "__main__":
    main()
