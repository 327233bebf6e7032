"""How long the first call of a neuron takes: cold, and when a process before has compiled it.

    python -m benchmarks.first_call

Each measurement is a process of its own. It imports torch and spikefuse, runs the eager loop on
the device, and then counts the seconds from the call of a neuron to the end of its backward
pass: tracing, importing the backend (Numba or Triton), generating and compiling the kernels or
loading them from disk, running them. First comes a neuron of the user's, then a LIF, which finds
the backend imported. "Cold" starts with empty cache folders, "warm" with those that it leaves.
"""

from __future__ import annotations

import argparse
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

import spikefuse as sf
from benchmarks import gated, layer, lif, record
from benchmarks.runner import spread

BACKENDS = {"triton": "cuda", "numba": "cpu"}
STATES = ("cold", "warm")
# A neuron, and how many inputs and outputs it has; in the order of the calls.
NEURONS = {"own": (gated.Gated, 2), "LIF": (lif.neuron, 1)}
BARS = {"cold": 4.0, "warm": 0.5}
SHAPE = (32, 1, 1000)
TIMEOUT = 120.0


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.first_call", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, help="default: all that run here")
    parser.add_argument("--neurons", nargs="+", choices=NEURONS, default=list(NEURONS))
    parser.add_argument("--repeats", type=int, help="processes of each kind (3)")
    parser.add_argument("--out", type=Path, help="folder for the result (benchmarks/results)")
    parser.add_argument("--quick", action="store_true", help="a trial: one process of each kind")
    parser.add_argument("--child", choices=BACKENDS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.repeats = args.repeats or (1 if args.quick else 3)
    args.backend = args.backend or [b for b in BACKENDS if available(b)]
    if args.repeats < 1:
        parser.error("--repeats must be at least 1")
    return args


def available(backend: str) -> bool:
    found = importlib.util.find_spec(backend) is not None
    return found and (backend != "triton" or torch.cuda.is_available())


def main(argv: list[str] | None = None) -> Path | None:
    args = arguments(argv)
    if args.child:
        print(json.dumps(child(args.child, args.neurons)))
        return None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = {"repeats": args.repeats, "shape": list(SHAPE), "dtype": "float32"}
    result = record.document("first_call", device, args.quick, settings) | {"rows": []}
    for backend in args.backend:
        result["rows"] += measure_one(backend, args.neurons, args.repeats)
    result["bars"] = [] if args.quick else bars(result["rows"])
    record.print_bars(result["bars"])
    path = record.write(record.folder(args.out, args.quick), result)
    print(f"wrote {path}")
    return path


def child(backend: str, names: list[str]) -> list[dict[str, Any]]:
    """The first call of each neuron in this process, verified."""
    device = torch.device(BACKENDS[backend])
    found = []
    for name in names:
        make, ports = NEURONS[name]
        neuron: sf.Neuron = make()
        inputs = layer.Inputs(SHAPE, torch.float32, device, ports, ports)
        truth = layer.Truth.of(neuron, inputs, exact=name == "LIF")
        contender = layer.ours(neuron, inputs)
        assert contender.run is not None
        inputs.prepare()
        synchronize(device)
        imported, start = backend in sys.modules, time.perf_counter()
        result = contender.run()
        synchronize(device)
        seconds = time.perf_counter() - start
        truth.verify(contender, result)
        found.append({"neuron": name, "backend_imported": imported, "seconds": round(seconds, 4)})
    return found


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_one(backend: str, names: list[str], repeats: int) -> list[dict[str, Any]]:
    """A row per neuron; one with the reason where a process failed."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="spikefuse-first-call-") as folder:
            for state in STATES:
                try:
                    found = in_process(backend, names, Path(folder))
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    print(f"{backend}, {state}: {error}", flush=True)
                    return [{"backend": backend, "status": "failed", "reason": str(error)}]
                for one in found:
                    seconds.setdefault((one["neuron"], state), []).append(one["seconds"])
                said = ", ".join(f"{one['neuron']} {one['seconds']:.2f} s" for one in found)
                print(f"{backend}, {state}: {said}", flush=True)
    return [
        {"backend": backend, "neuron": name, "status": "ok"}
        | {state: spread(seconds[name, state]) for state in STATES}
        for name in names
    ]


def in_process(backend: str, names: list[str], folder: Path) -> list[dict[str, Any]]:
    """What `child` finds in a process whose caches are in `folder`.

    Raises:
        RuntimeError: the process failed, with its last line.
    """
    # Without the first, Numba's cache lies in spikefuse's.
    unset = ("NUMBA_CACHE_DIR", "TRITON_INTERPRET")
    environment = {k: v for k, v in os.environ.items() if k not in unset}
    for name in ("SPIKEFUSE_CACHE_DIR", "TRITON_CACHE_DIR"):
        environment[name] = str(folder / name.lower())
    command = [sys.executable, "-m", "benchmarks.first_call", "--child", backend]
    command += ["--neurons", *names]
    done = subprocess.run(
        command, cwd=record.ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT
    )
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise RuntimeError(f"exit code {done.returncode}: {lines[-1][:300]}")
    found: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The project's own bars; what could not be measured is missed."""
    found = []
    for row in rows:
        where = f"{row['backend']}, {row.get('neuron', 'any neuron')}"
        for state, limit in BARS.items():
            measured = row[state]["median"] if row["status"] == "ok" else None
            found.append(record.bar(f"{where}: {state}, s", measured, limit, at_least=False))
    return found


if __name__ == "__main__":
    main()
