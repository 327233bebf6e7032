"""Run the benchmarks that suit this machine, then rebuild the tables of the documentation.

    python -m benchmarks            on a GPU: neurons, recurrent layers, delays, blocks, networks,
                                    online learning;
                                    anywhere: events, first call, methods, latency, whole steps on a
                                    CPU
    python -m benchmarks --gpus     on several GPUs: data-parallel steps, time and neuron sharding

Each runs in its own process, and the others still run if one fails. Training runs (`reproduce`,
`accuracy`, `spoken_digits`, `sequential`, the tasks of `online`) are started by hand.
"""

from __future__ import annotations

import subprocess
import sys

import torch

from benchmarks import record
from benchmarks.runner import plain_parser

ON_GPU = ("neurons steps", "neurons", "neurons block", "recurrent", "delays", "networks",
          "online time", "online memory")  # fmt: skip
TABLES = tuple(f"tables --page {page}" for page in record.PAGES)
ANYWHERE = ("events", "neurons first_call", "cpu", "plasticity", "methods", "latency",
            *TABLES)  # fmt: skip
WORKLOADS = ("resnet18-mnist", "alexnet-imagenet", "resnet34-imagenet")


def commands(gpus: int) -> list[list[str]]:
    """Return the commands for no GPU, for one, or for several."""
    python = [sys.executable, "-m"]
    ranks: list[tuple[int, str]] = []
    names = [*(ON_GPU if gpus else ()), *ANYWHERE]
    if gpus > 1:
        names = list(TABLES)
        ranks = [(gpus, "parallel time"), (gpus, "events sharded")]
        ranks += [(2, f"parallel data --workload {w}") for w in WORKLOADS]
    torchrun = [*python, "torch.distributed.run", "--standalone", "--nproc_per_node"]
    return [
        *([*torchrun, str(n), "-m", *f"benchmarks.{name}".split()] for n, name in ranks),
        *([*python, *f"benchmarks.{name}".split()] for name in names),
    ]


def main(argv: list[str] | None = None) -> None:
    parser = plain_parser("benchmarks", __doc__)
    parser.add_argument("--gpus", action="store_true", help="the benchmarks of several GPUs")
    args = parser.parse_args(argv)
    available = torch.cuda.device_count()
    if args.gpus and available < 2:
        parser.error(f"--gpus needs two GPUs, this machine has {available}")
    if not available:
        print("no GPU: neurons, recurrent layers, delays, blocks and networks are left out")
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
