"""One layer of neurons: over models, sizes and time steps, behind a batch norm, and its first call.

    python -m benchmarks.neurons                    models and sizes
    python -m benchmarks.neurons models --groups lif zoo
    python -m benchmarks.neurons steps              time and memory of a LIF layer over T
    python -m benchmarks.neurons block              batch norm and LIF neurons as one block
    python -m benchmarks.neurons block --dtype bfloat16 --layout contiguous --shapes T=4
    python -m benchmarks.neurons first_call         with empty and with filled caches

steps is Fig. 5 of "Towards Scalable GPU-Accelerated SNN Training via Temporal Fusion" for one layer
of 1,000,000 LIF neurons, with the eager loop (up to T = 64) and torch.compile (up to T = 32).

block is compared with torch's batch norm followed by our neuron, and by SpikingJelly's function
with a float32 state on a view of its result.

The roofline is the time in which the machine copies the bytes that must move, measured in the same
row: inputs are read twice, outputs and gradients of inputs written, gradients of outputs read. A
block reads x four times (statistics, forward, two backward passes), the gradient of its output
twice, and writes its output and the gradient of x.

first_call times a neuron's first call in a process, to the end of its backward pass: tracing,
importing the backend (Numba or Triton), compiling the kernels or loading them from disk, and
running them. torch and spikefuse are imported before, and the device is used. A user-defined neuron
comes first; the LIF after it finds the backend imported. "Cold" processes start with empty cache
folders, "warm" ones with those that a cold process has filled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import jelly, layers, plots, record, runner
from benchmarks.layers import (
    ALLOWED,
    COMPILED,
    DTYPES,
    LOOP,
    OURS,
    Inputs,
    LayerResult,
    LayerTruth,
    compare,
    trained,
)
from benchmarks.runner import Contender, Record, Timing, first_line, measure, spread, synchronize
from spikefuse.nn import Block

GROUPS = ("lif", "inference", "zoo", "layout", "long", "wide", "host")
COPY_BYTES = 1 << 31  # many times the size of a GPU's cache
CHANNELS_LAST = f"{OURS}, channels-last"
MILLION = 1_000_000
STEPS = tuple(1 << i for i in range(11))
# FlexSN's kernels unroll the time steps. Kernels of 128 steps do not compile within five minutes.
LARGEST_T = {LOOP: 64, COMPILED: 32, jelly.FLEXSN: 32}

SHAPES = {"large": (32, 100, 64, 56, 56)}
SHAPES |= {f"T={T}": (T, 1024 // T, 64, 32, 32) for T in (1, 4, 8, 32)}
QUICK_SHAPE = (4, 3, 4, 5, 5)
LAYOUTS = {"channels-last": torch.channels_last, "contiguous": torch.contiguous_format}
RECOMPUTED = f"{OURS}, recomputed states"
SEPARATE = f"batch norm, then {OURS}"
RIVAL = f"batch norm, then {jelly.FUNCTION}"
SEQUENCES = 8  # that a block must read or write: six reads and two writes
# Allowed difference of contenders that round the result of a norm of their own to bfloat16, which
# flips spikes near the threshold.
ROUNDED_NORM = 0.05

FIRST_CALL = "first_call"
BACKENDS = {"triton": "cuda", "numba": "cpu"}
CACHES = ("cold", "warm")
FIRST_SHAPE, FIRST_ROUNDS, TIMEOUT = (32, 1, 1000), 3, 120.0

Cases = Iterator[tuple[str, Callable[[], Record]]]


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("neurons", __doc__)
    parser.add_argument("what", nargs="?", default="models",
                        choices=(*MEASUREMENTS, FIRST_CALL))  # fmt: skip
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS),
                        metavar="GROUP", help="groups of models (all)")  # fmt: skip
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS),
                        metavar="MODEL", help="neurons of the groups (all)")  # fmt: skip
    parser.add_argument("--T", type=int, nargs="+", help="of models (all) and steps (1 2 ... 1024)")
    parser.add_argument("--N", type=int, help="neurons of steps (1,000,000)")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES),
                        help="of block (all)")  # fmt: skip
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=list(LAYOUTS),
                        help="of block (both)")  # fmt: skip
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, help="of first_call (all usable)")
    parser.add_argument("--neurons", nargs="+", choices=FIRST, default=list(FIRST),
                        help="of first_call (both)")  # fmt: skip
    args = runner.parse(parser, argv)
    args.N = args.N or (1000 if args.quick else MILLION)
    if args.what == FIRST_CALL:
        args.usual_name = FIRST_CALL
        return runner.write_rows(args, first_call_rows(args))
    args.usual_name, cases, plot = MEASUREMENTS[args.what]
    return runner.run_cases(args, cases(args), plot=plot)


# Models and sizes


class Gated(sf.Neuron):
    """A user-defined neuron with an adaptive threshold and a gate between hard and soft reset::

        h = decay * v + x,   theta = threshold + beta * a,   s = 1 if h >= theta else 0
        v = h - s * (g * h + (1 - g) * theta)   with   g = sigmoid(gate)
        a = rho * a + s

    The outputs are the spike and the potential before reset.
    """

    v, a = sf.State(), sf.State()

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.rho, self.beta, self.threshold = 0.9, 0.97, 0.18, 1.0
        self.surrogate = sf.surrogate.Sigmoid(layers.WIDTH)

    def step(self, x, gate, v, a):
        h = self.decay * v + x
        theta = self.threshold + self.beta * a
        s = self.surrogate(h - theta)
        g = torch.sigmoid(gate)
        return (s, h), (h - s * (g * h + (1 - g) * theta), self.rho * a + s)


def plif() -> sf.Neuron:
    neuron = sf.PLIF(channels=64)
    with torch.no_grad():  # a different decay in each channel
        for logit in neuron.parameters():
            logit.copy_(torch.linspace(-1, 1, 64))
    return neuron


@dataclass(frozen=True)
class Model:
    """A neuron and its input, uniform up to `high`.

    `exact`: whether it uses only operations that are correctly rounded everywhere.
    """

    make: Callable[[], sf.Neuron]
    exact: bool = True
    high: float = 1.0
    ports: int = 1


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
    # Group, model, shape and dtypes.
    plan: list[tuple[str, str, tuple[int, ...], tuple[str, ...]]] = [
        *(("lif", "LIF", (T, *flat), both) for T in (4, 32, 128)),
        ("inference", "LIF", (128, *flat), both),
        *(("zoo", "PLIF per channel", (T, *picture), both) for T in (32, 128)),
        *(
            ("zoo", model, (T, *flat), both)
            for model in ("ALIF", "CubaLIF", "Izhikevich")
            for T in (32, 128)
        ),
        ("zoo", "two inputs, two outputs", (32, *flat), both),
        ("layout", "LIF", (32, 100, 64, 56, 56), ("bfloat16",)),
        ("long", "LIF", (1024, *flat), both),
        ("wide", "LIF", (32, 1, 8 * MILLION), both),
        ("host", "LIF", (1, 1, 32), ("float32",)),
    ]
    timing, device = Timing.of(args, COPY_BYTES), torch.device(args.device)
    for group, model, shape, dtypes in plan:
        for dtype in dtypes:
            wanted = group in args.groups and model in args.models and dtype in args.dtype
            if wanted and shape[0] in (args.T or [shape[0]]):
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
    inputs = Inputs.draw(shape, DTYPES[dtype], device, model.ports, model.high)
    truth = LayerTruth(neuron, inputs, model.exact, training)
    chosen = [layers.ours(neuron, inputs)]
    if not training:
        chosen = [Contender(OURS, partial(layers.infer, neuron, inputs))]
    if group in ("lif", "host"):
        chosen += jelly.lif(inputs)
    if group in ("lif", "zoo") and name in jelly.CORES:
        flexsn = partial(jelly.flexsn, name, neuron, inputs)
        chosen.append(limited(jelly.FLEXSN, shape[0], flexsn))
    if group == "layout":
        last = inputs.in_layout(torch.channels_last)
        chosen.append(layers.ours(neuron, last, CHANNELS_LAST))
    about = {"group": group, "neuron": name, "T": shape[0], "N": torch.Size(shape[1:]).numel()}
    about |= {"dtype": dtype, "training": training}
    about["output_bytes"] = inputs.xs[0].nbytes * model.ports
    return about | measure(chosen, truth.verify, timing, inputs.bytes_to_move(training))


# Time steps


def step_cases(args: argparse.Namespace) -> Cases:
    timing = Timing.of(args, COPY_BYTES)
    for dtype in args.dtype:
        for T in args.T or ([2, 4] if args.quick else STEPS):
            yield f"T={T}, {dtype}", partial(measure_steps, args, timing, T, dtype)


def measure_steps(args: argparse.Namespace, timing: Timing, T: int, dtype: str) -> Record:
    inputs = Inputs.draw((T, 1, args.N), DTYPES[dtype], torch.device(args.device))
    neuron = layers.lif()
    truth = LayerTruth(neuron, inputs)
    chosen = [layers.ours(neuron, inputs), *jelly.lif(inputs)[1:]]
    loop = trained(LOOP, partial(neuron, impl="reference"), inputs)
    chosen.append(limited(LOOP, T, lambda: loop))
    if not args.quick:
        chosen.append(limited(COMPILED, T, partial(layers.compiled, inputs)))
    about = {"T": T, "N": args.N, "dtype": dtype, "input_bytes": inputs.num_bytes}
    return about | measure(chosen, truth.verify, timing, inputs.bytes_to_move())


def limited(name: str, T: int, make: Callable[[], Contender]) -> Contender:
    """Make a contender that is measured up to a number of steps."""
    largest = LARGEST_T[name]
    if largest >= T:
        return make()
    return Contender(name, unavailable=f"measured up to T = {largest} only")


# Batch norm and neurons as one block


def block_cases(args: argparse.Namespace) -> Cases:
    timing, device = Timing.of(args, COPY_BYTES), torch.device(args.device)
    for layout in args.layout:
        for name in args.shapes:
            shape = QUICK_SHAPE if args.quick else SHAPES[name]
            for dtype in args.dtype:
                run = partial(measure_block, timing, shape, device, dtype, layout)
                yield f"{name}, {dtype}, {layout}", run


def measure_block(
    timing: Timing, shape: tuple[int, ...], device: torch.device, dtype: str, layout: str
) -> Record:
    inputs = Inputs.draw(shape, DTYPES[dtype], device).in_layout(LAYOUTS[layout])
    norm = make_norm(shape[2], device)
    params, neuron = tuple(norm.parameters()), layers.lif()

    def normalized(x: Tensor) -> Tensor:
        return norm(x.flatten(0, 1))

    made: dict[str, Callable[[Tensor], Tensor]] = {
        OURS: Block(norm, layers.lif(), sf.memory.Bits()),
        RECOMPUTED: Block(norm, layers.lif(), sf.memory.Recompute()),
        SEPARATE: lambda x: neuron(normalized(x).unflatten(0, x.shape[:2])),
    }
    missing = []
    try:
        rival = jelly.Function(shape[0], jelly.Jelly(device).function)
        made[RIVAL] = lambda x: rival(normalized(x)).unflatten(0, x.shape[:2])
    except Exception as error:
        missing = [Contender(RIVAL, unavailable=first_line(error))]
    chosen = [trained(name, function, inputs, params) for name, function in made.items()]
    verify = block_check(norm, inputs)
    about = {"shape": list(shape), "dtype": dtype, "layout": layout}
    return about | measure([*chosen, *missing], verify, timing, SEQUENCES * inputs.xs[0].nbytes)


def make_norm(channels: int, device: torch.device) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, device=device)
    with torch.no_grad():  # different values in each channel
        norm.weight.copy_(torch.linspace(0.5, 1.5, channels))
        norm.bias.copy_(torch.linspace(-0.5, 0.5, channels))
    return norm


def block_check(norm: nn.BatchNorm2d, inputs: Inputs) -> Callable[[Contender, LayerResult], None]:
    """Return a comparison with the reference's block."""
    loop = partial(Block(norm, layers.lif()), impl="reference")
    expected = layers.train(loop, inputs, tuple(norm.parameters()))

    def verify(contender: Contender, result: LayerResult) -> None:
        rounded = contender.name in (SEPARATE, RIVAL) and inputs.xs[0].dtype != torch.float32
        compare(result, expected, ROUNDED_NORM if rounded else ALLOWED)

    return verify


# First calls

# A neuron and its number of inputs and outputs, in the order of the calls.
FIRST: dict[str, tuple[Callable[[], sf.Neuron], int]] = {"own": (Gated, 2), "LIF": (layers.lif, 1)}


def first_call_rows(args: argparse.Namespace) -> Iterator[Record]:
    """Yield a row per backend and neuron, or one for the backend if a process failed."""
    usable = [b for b, device in BACKENDS.items() if device == "cpu" or torch.cuda.is_available()]
    for backend in args.backend or usable:
        seconds: dict[tuple[str, str], list[float]] = {}
        try:
            for _ in range(1 if args.quick else min(args.rounds, FIRST_ROUNDS)):
                with tempfile.TemporaryDirectory(prefix="spikefuse-first-call-") as folder:
                    for cache in CACHES:
                        for name, taken in in_process(backend, args.neurons, Path(folder)).items():
                            seconds.setdefault((name, cache), []).append(taken)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            yield {"backend": backend, "status": "failed", "reason": str(error)}
            continue
        for name in args.neurons:
            row = {"backend": backend, "neuron": name, "status": "ok"}
            yield row | {cache: spread(seconds[name, cache]) for cache in CACHES}


def in_process(backend: str, names: list[str], folder: Path) -> dict[str, float]:
    """Run `first_calls` in a process with its caches in `folder`.

    Raises:
        RuntimeError: the process failed; the message is its last line.
    """
    # By default, Numba's cache lies inside spikefuse's.
    unset = ("NUMBA_CACHE_DIR", "TRITON_INTERPRET")
    environment = {k: v for k, v in os.environ.items() if k not in unset}
    for name in ("SPIKEFUSE_CACHE_DIR", "TRITON_CACHE_DIR"):
        environment[name] = str(folder / name.lower())
    code = f"from benchmarks.neurons import first_calls; first_calls({backend!r}, {names!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=record.ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise RuntimeError(f"exit code {done.returncode}: {lines[-1][:300]}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def first_calls(backend: str, names: list[str]) -> None:
    """Time and verify the first call of each neuron in this process; print seconds by name."""
    device, found = torch.device(BACKENDS[backend]), {}
    for name in names:
        make, ports = FIRST[name]
        neuron = make()
        inputs = Inputs.draw(FIRST_SHAPE, torch.float32, device, ports)
        truth = LayerTruth(neuron, inputs, exact=name == "LIF")
        synchronize(device)
        start = time.perf_counter()
        result = layers.train(neuron, inputs)
        synchronize(device)
        found[name] = round(time.perf_counter() - start, 4)
        truth.verify(Contender(OURS), result)
    # A thread of autograd still releases the gradients that it has returned. If Python exits
    # meanwhile, PyTorch aborts the process. After another backward pass, they are released.
    torch.ones((), device=device, requires_grad=True).backward()
    print(json.dumps(found))


# By command: the name of the result, its cases and its plot.
MEASUREMENTS: dict[str, tuple[str, Callable[[argparse.Namespace], Cases], Callable | None]] = {
    "models": ("neurons", model_cases, None),
    "steps": ("timestep_scaling", step_cases, plots.timestep_scaling),
    "block": ("block", block_cases, None),
}


if __name__ == "__main__":
    main()
