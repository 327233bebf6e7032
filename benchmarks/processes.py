"""What the benchmarks of several processes share: starting, failing and timing together."""

from __future__ import annotations

import argparse
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import runner
from benchmarks.runner import EAGER, WAYS, Record, spread, synchronize
from spikefuse.distributed import connect, disconnect
from spikefuse.train.processes import Processes

REPETITIONS = 5  # steps in a round


def run_processes(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    rows: Callable[[argparse.Namespace, torch.device], Iterator[Record]],
    plot: Callable[[Record, Path], Any] | None = None,
) -> Path | None:
    """Measure rows in all processes that torchrun started; the main process writes them."""
    processes, path = Processes.started(), None
    if "TORCHELASTIC_RUN_ID" not in os.environ or processes.count < 2:
        parser.error("start it with torchrun --nproc_per_node N, N at least 2")
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", processes.local_rank)
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True  # as in the trainer
        # NCCL's error handling would query events while a graph is recorded.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    settings = runner.settings_of(args) | {"processes": processes.count}
    connect("nccl" if device.type == "cuda" else "gloo")
    if processes.main:
        path = runner.write_rows(args, rows(args, device), settings, plot=plot)
    else:
        deque(rows(args, device), maxlen=0)
    disconnect()  # skipped after an exception: it needs all processes
    return path


def highest(value: float, device: torch.device) -> float:
    """Return the highest value of any rank."""
    found = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def failure(status: str, reason: str, device: torch.device) -> Record | None:
    """Return a row with the status if there is a reason on any rank."""
    if not highest(bool(reason), device):
        return None
    return {"status": status, "reason": reason or f"another process is {status}"}


def averaging(net: nn.Module, device: torch.device, **options: Any) -> nn.Module:
    """Wrap a network in DistributedDataParallel so that its steps can be recorded."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with torch.cuda.stream(stream):
        model = DistributedDataParallel(net, **options)
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
    return model


def ways(device: torch.device) -> tuple[str, ...]:
    return WAYS if device.type == "cuda" else (EAGER,)  # eager first, as recording may fail


def time_together(
    steps: Mapping[str, Callable[[], object]], device: torch.device, rounds: int
) -> dict[str, Record]:
    """Return the milliseconds of each step on the slowest rank of each round, taken in turns."""
    together = torch.zeros(1, device=device)

    def wait_for_all() -> None:
        dist.all_reduce(together)
        synchronize(device)

    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            step()
            wait_for_all()
            start = time.perf_counter()
            for _ in range(REPETITIONS):
                step()
                dist.all_reduce(together)  # a step ends when all ranks have ended it
            wait_for_all()
            taken[name].append((time.perf_counter() - start) / REPETITIONS * 1e3)
    values = torch.tensor([*taken.values()], dtype=torch.float64, device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return {name: spread(ms) for name, ms in zip(taken, values.tolist(), strict=True)}
