"""Run the benchmarks that this machine is for, then rebuild the tables in docs/benchmarks.md,
README.md and a tutorial.

    python -m benchmarks            neurons, networks, events, first call, CPU
    python -m benchmarks --gpus     on several GPUs: DDP, time sharding, neuron sharding

Each runs in its own process, and the others still run if one fails. Training runs
(`benchmarks.training`, `benchmarks.accuracy`, `benchmarks.event_accuracy`,
`benchmarks.spoken_digits`) are started by hand.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import torch

from benchmarks import record

ON_GPU = ("neurons steps", "neurons", "recurrent", "block", "networks")
PAGES = ("docs/benchmarks.md", "README.md", "docs/tutorials/fast.ipynb")
TABLES = tuple(f"tables --page {page}" for page in PAGES)
ANYWHERE = ("events --streaming", "first_call", "neurons cpu", "cpu", *TABLES)


def commands(gpus: int) -> list[list[str]]:
    """Return the commands for no GPU, for one, or for several."""
    python = [sys.executable, "-m"]
    if gpus < 2:
        names = [*(ON_GPU if gpus else ()), *ANYWHERE]
        return [[*python, *f"benchmarks.{name}".split()] for name in names]
    torchrun = [*python, "torch.distributed.run", "--standalone", "--nproc_per_node"]
    found = [[*torchrun, str(gpus), "-m", "benchmarks.time_sharding"]]
    for workload in ("resnet18-mnist", "alexnet-imagenet", "resnet34-imagenet"):
        found.append([*torchrun, "2", "-m", "benchmarks.ddp", "--workload", workload])
    ranks = [str(n) for n in (1, 2, 4, 8) if n <= gpus]
    found.append([*python, "benchmarks.event_scaling", "--ranks", *ranks])
    return [*found, *([*python, *f"benchmarks.{name}".split()] for name in TABLES)]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpus", action="store_true", help="the benchmarks of several GPUs")
    args = parser.parse_args(argv)
    available = torch.cuda.device_count()
    if args.gpus and available < 2:
        parser.error(f"--gpus needs two GPUs, this machine has {available}")
    if not available:
        print("no GPU: neurons, blocks and networks are left out")
    failed = []
    for command in commands(available if args.gpus else min(available, 1)):
        text = " ".join(command[1:])
        print(f"== {text}", flush=True)
        if subprocess.run(command, cwd=record.ROOT, check=False).returncode:
            failed.append(text)
    if failed:
        sys.exit("failed: " + "; ".join(failed))


if __name__ == "__main__":
    main()
