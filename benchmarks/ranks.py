"""What the benchmarks of several processes share: launching, devices, and timing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import record
from benchmarks.runner import spread
from spikefuse.train.processes import Processes

REPETITIONS = 3  # steps in a round


def torchrun(module: str, count: int, *arguments: str) -> int:
    """Run a benchmark in `count` processes of this machine; return the exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(count), "-m", f"benchmarks.{module}", *arguments]
    return subprocess.run(command, cwd=record.ROOT, check=False).returncode


def rank_device(kind: str, processes: Processes) -> torch.device:
    """Return this rank's device and select it."""
    if kind != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", processes.local_rank)
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = True  # as in the trainer
    # NCCL's error handling would query events while a graph is recorded.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    return device


def averaging(net: nn.Module, device: torch.device, **options: Any) -> nn.Module:
    """Wrap a network in DistributedDataParallel so that its steps can be recorded."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with torch.cuda.stream(stream):
        model = DistributedDataParallel(net, **options)
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
    return model


def time_together(step: Callable[[], object], device: torch.device, rounds: int) -> dict[str, Any]:
    """Return milliseconds of a step, in each round those of the slowest rank."""
    together = torch.zeros(1, device=device)

    def synchronize() -> None:
        dist.all_reduce(together)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(REPETITIONS):
        step()
    found = []
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        for _ in range(REPETITIONS):
            step()
            dist.all_reduce(together)  # a step ends when all ranks have ended it
        synchronize()
        found.append((time.perf_counter() - start) / REPETITIONS * 1e3)
    values = torch.tensor(found, dtype=torch.float64, device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return spread(values.tolist())


def peak_bytes(step: Callable[[], object], device: torch.device, before: int) -> int:
    """Return the peak memory of a step beyond `before`, on the rank that needs most."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return int(highest(torch.cuda.max_memory_allocated(device) - before, device))


def highest(value: float, device: torch.device) -> float:
    """Return the highest value of any rank."""
    found = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)
