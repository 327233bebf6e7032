"""The time of a neuron's first call in a process, with empty and with filled caches.

    python -m benchmarks.first_call

Each measurement runs in its own process. The process imports torch and spikefuse, runs the eager
loop on the device, and then times a neuron from its call to the end of its backward pass: tracing,
importing the backend (Numba or Triton), compiling the kernels or loading them from disk, and
running them. A user-defined neuron comes first; the LIF after it finds the backend imported. "Cold"
processes start with empty cache folders, "warm" ones with those that a cold process has filled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import layers, record, runner
from benchmarks.layers import Gated, Inputs, LayerTruth
from benchmarks.runner import Record, spread, synchronize

BACKENDS = {"triton": "cuda", "numba": "cpu"}
STATES = ("cold", "warm")
# A neuron and its number of inputs and outputs, in the order of the calls.
NEURONS = {"own": (Gated, 2), "LIF": (layers.lif, 1)}
SHAPE = (32, 1, 1000)
TIMEOUT = 120.0


def main(argv: list[str] | None = None) -> Path | None:
    parser = runner.make_parser("first_call", __doc__, rounds=3)
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, help="default: all available")
    parser.add_argument("--neurons", nargs="+", choices=NEURONS, default=list(NEURONS))
    parser.add_argument("--child", action="store_true", help="time this process, print JSON")
    args = runner.parse(parser, argv)
    if args.child:
        print(json.dumps(first_calls(args.backend[0], args.neurons)))
        return None
    usable = {"triton": torch.cuda.is_available(), "numba": True}
    args.backend = args.backend or [b for b in BACKENDS if usable[b]]
    args.rounds = 1 if args.quick else args.rounds
    return runner.write_rows(args, rows(args))


def first_calls(backend: str, names: list[str]) -> dict[str, float]:
    """Time and verify the first call of each neuron in this process; return seconds by name."""
    device, found = torch.device(BACKENDS[backend]), {}
    for name in names:
        make, ports = NEURONS[name]
        neuron = make()
        inputs = Inputs(SHAPE, torch.float32, device, ports)
        truth = LayerTruth(neuron, inputs, exact=name == "LIF")
        contender = layers.ours(neuron, inputs)
        assert contender.run is not None
        inputs.prepare()
        synchronize(device)
        start = time.perf_counter()
        result = contender.run()
        synchronize(device)
        found[name] = round(time.perf_counter() - start, 4)
        truth.verify(contender, result)
    return found


def rows(args: argparse.Namespace) -> Iterator[Record]:
    """Yield a row per backend and neuron, or one for the backend if a process failed."""
    for backend in args.backend:
        seconds: dict[tuple[str, str], list[float]] = {}
        try:
            for _ in range(args.rounds):
                with tempfile.TemporaryDirectory(prefix="spikefuse-first-call-") as folder:
                    for state in STATES:
                        found = in_process(backend, args.neurons, Path(folder))
                        for name, taken in found.items():
                            seconds.setdefault((name, state), []).append(taken)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            yield {"backend": backend, "status": "failed", "reason": str(error)}
            continue
        for name in args.neurons:
            row = {"backend": backend, "neuron": name, "status": "ok"}
            yield row | {state: spread(seconds[name, state]) for state in STATES}


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
    command = [sys.executable, "-m", "benchmarks.first_call", "--child", "--backend", backend]
    done = subprocess.run(
        [*command, "--neurons", *names],
        cwd=record.ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise RuntimeError(f"exit code {done.returncode}: {lines[-1][:300]}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
