"""The time of a neuron's first call in a process, with empty and with filled caches.

    python -m benchmarks.first_call

Each measurement is a process of its own. It imports torch and spikefuse, runs the eager loop on the
device, and then times a neuron from its call to the end of its backward pass: tracing, importing
the backend (Numba or Triton), compiling the kernels or loading them from disk, and running them.
A user-defined neuron comes first; the LIF after it finds the backend imported. "Cold" processes
start with empty cache folders, "warm" processes with those that a cold process has filled.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import layers, record, runner
from benchmarks.layers import Gated, Inputs, LayerInput, LayerTruth
from benchmarks.runner import spread

BACKENDS = {"triton": "cuda", "numba": "cpu"}
STATES = ("cold", "warm")
# A neuron and its number of inputs and outputs, in the order of the calls.
NEURONS = {"own": (Gated, 2), "LIF": (layers.lif, 1)}
SHAPE = (32, 1, 1000)
TIMEOUT = 120.0


def available(backend: str) -> bool:
    found = importlib.util.find_spec(backend) is not None
    return found and (backend != "triton" or torch.cuda.is_available())


def main(argv: list[str] | None = None) -> Path | None:
    parser = runner.make_parser("first_call", __doc__, rounds=3)
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, help="default: all available")
    parser.add_argument("--neurons", nargs="+", choices=NEURONS, default=list(NEURONS))
    parser.add_argument("--child", action="store_true", help="time this process, print JSON")
    args = runner.parse(parser, argv)
    args.backend = args.backend or [b for b in BACKENDS if available(b)]
    if args.child:
        print(json.dumps(first_calls(args.backend[0], args.neurons)))
        return None
    if args.quick:
        args.rounds = 1
    settings = {"repeats": args.rounds, "shape": list(SHAPE), "dtype": "float32"}
    result = record.document("first_call", torch.device(args.device), args.quick, settings)
    result["rows"] = [
        row for b in args.backend for row in measure_backend(b, args.neurons, args.rounds)
    ]
    path = record.write(record.folder(args.out, args.quick), result)
    print(f"wrote {path}")
    return path


def first_calls(backend: str, names: list[str]) -> dict[str, float]:
    """Time and verify the first call of each neuron in this process; return seconds by name."""
    device, found = torch.device(BACKENDS[backend]), {}
    for name in names:
        make, ports = NEURONS[name]
        neuron = make()
        inputs = Inputs(LayerInput(SHAPE, torch.float32, device, ports, ports))
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


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_backend(backend: str, names: list[str], repeats: int) -> list[dict[str, Any]]:
    """Return a row per neuron, or one row with the reason if a process failed."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="spikefuse-first-call-") as folder:
            for state in STATES:
                try:
                    found = in_process(backend, names, Path(folder))
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    print(f"{backend}, {state}: {error}", flush=True)
                    return [{"backend": backend, "status": "failed", "reason": str(error)}]
                for name, taken in found.items():
                    seconds.setdefault((name, state), []).append(taken)
                print(f"{backend}, {state}: {found}", flush=True)
    return [
        {"backend": backend, "neuron": name, "status": "ok"}
        | {state: spread(seconds[name, state]) for state in STATES}
        for name in names
    ]


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
