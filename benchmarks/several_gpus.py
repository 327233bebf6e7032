"""What is tested and measured on several GPUs: the tests, then all measurements, then the tables.

    python -m benchmarks.several_gpus              on all GPUs of this machine
    python -m benchmarks.several_gpus --no-tests   measurements only

Each runs in processes of its own, by pytest or torchrun, and writes its result; what fails does not
keep the next one from running, and is named in the end.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys

import torch

from benchmarks import bars, ddp, record

TESTS = (
    "tests/gpu/test_time_processes.py",
    "tests/gpu/test_neuron_processes.py",
    "tests/gpu/test_train_processes.py",
    "tests/distributed",
)


def commands(gpus: int, tests: bool) -> list[list[str]]:
    """All of them, in their order."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    found = [[sys.executable, "-m", "pytest", "-q", *TESTS]] if tests else []
    found.append([*torchrun, str(gpus), "-m", "benchmarks.time_sharding"])
    for workload in (ddp.WORKLOAD, *bars.AGAINST_EAGER):
        found.append([*torchrun, "2", "-m", "benchmarks.ddp", "--workload", workload])
    ranks = [str(n) for n in (1, 2, 4, 8) if n <= gpus]
    found.append([sys.executable, "-m", "benchmarks.event_scaling", "--ranks", *ranks])
    found.append([sys.executable, "-m", "benchmarks.tables"])
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("benchmarks.several_gpus", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--no-tests", action="store_true", help="measurements only")
    args = parser.parse_args(argv)
    gpus = torch.cuda.device_count()
    if gpus < 2:
        parser.error(f"this machine has {gpus} GPUs: it needs two")
    failed = []
    for command in commands(gpus, not args.no_tests):
        told = shlex.join(["python", *command[1:]])
        print(f"== {told}", flush=True)
        if subprocess.run(command, cwd=record.ROOT, check=False).returncode:
            failed.append(told)
    if failed:
        sys.exit("failed: " + "; ".join(failed))


if __name__ == "__main__":
    main()
