"""Training steps on several GPUs by DistributedDataParallel, against steps on one GPU.

    torchrun --nproc_per_node 2 -m benchmarks.ddp
    torchrun --nproc_per_node 2 -m benchmarks.ddp --workload resnet34-imagenet

T = 32, batches of 100 per process, bfloat16, channels-last, over NCCL, on CPUs over Gloo. Networks
for ImageNet are compared with the eager loop. In turns, the first process steps alone while the
others wait, and all step together; eagerly, and as replays of a CUDA graph. The gradients of the
common step must equal the mean of the gradients that the processes compute alone.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import networks, runner
from benchmarks.agreement import ROUNDING, StepResult, difference
from benchmarks.layers import DTYPES, LOOP, OURS
from benchmarks.networks import FUSED, WORKLOADS, Task
from benchmarks.runner import (
    GRAPH,
    NO_GRAPHS,
    WAYS,
    Contender,
    CpuClock,
    GpuClock,
    Record,
    first_line,
    record_graph,
    spread,
    synchronize,
)
from spikefuse.train.processes import Processes

WORKLOAD = "resnet18-mnist"
REPETITIONS = 20  # steps in a turn
SPIKING: dict[str, dict[str, Any]] = {
    FUSED: {"fused": True},
    OURS: {},
    LOOP: {"impl": "reference"},
}


def main(argv: list[str] | None = None) -> Path | None:
    """Measure; return the path of the result in the main process."""
    parser = runner.make_parser("ddp", __doc__)
    parser.add_argument("--workload", choices=WORKLOADS, default=WORKLOAD, metavar="WORKLOAD",
                        help=f"of {', '.join(WORKLOADS)} ({WORKLOAD})")  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--networks", nargs="+", choices=SPIKING, metavar="NETWORK",
                        help=f"of {', '.join(SPIKING)}")  # fmt: skip
    args = runner.parse(parser, argv)
    usual = (FUSED, LOOP) if args.workload.endswith("-imagenet") else (FUSED, OURS)
    args.networks = args.networks or list(usual)
    if args.workload != WORKLOAD:
        args.name += f"_{args.workload}"
    return run_processes(parser, args, rows, describe)


def rows(args: argparse.Namespace, device: torch.device) -> Iterator[Record]:
    workload = WORKLOADS["conv-mnist"].small() if args.quick else WORKLOADS[args.workload]
    processes = Processes.started()
    task = Task(workload, args.dtype, device, seed=processes.rank)
    for name in args.networks:
        for way in WAYS:
            row = {"network": name, "way": way, "processes": processes.count}
            yield row | measure_step(task, SPIKING[name], way, args)
            gc.collect()  # a graph must not outlive its connections


@dataclass(frozen=True)
class RankStep:
    """A network, its training step, and the memory that a graph of it holds."""

    net: nn.Module
    step: Callable[[], StepResult]
    held_bytes: int = 0


def make_step(task: Task, network: networks.Network, way: str) -> RankStep:
    step, held = network.step(task, "training"), 0
    if way == GRAPH:
        step, held = record_graph(step)
    return RankStep(network.net, step, held)


def verify(task: Task, alone: RankStep, together: RankStep) -> None:
    """Compare the step of all processes with the steps of each process alone.

    Raises:
        AssertionError: the loss or the gradients differ.
    """
    task.restore(alone.net)
    task.restore(together.net)
    expected = alone.step()
    means = [g.clone() for g in expected.grads]
    for mean in means:
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    found = together.step()
    assert expected.loss is not None
    assert found.loss is not None
    allowed = ROUNDING[task.dtype]
    for what, error in (
        ("the loss", difference([found.loss], [expected.loss])),
        ("gradients", difference(found.grads, means)),
    ):
        assert error <= allowed, f"{what} differ by {error:.3g}, allowed is {allowed:g}"


def measure_step(task: Task, options: dict[str, Any], way: str, args: argparse.Namespace) -> Record:
    """Verify a step, then time it in turns. If one process fails, all report it."""
    device, processes, reason = task.device, Processes.started(), ""
    if way == GRAPH and device.type != "cuda":
        return {"status": "unavailable", "reason": NO_GRAPHS}
    steps: dict[str, RankStep] = {}
    wrap = partial(averaging, device=device, device_ids=[device] if device.type == "cuda" else None)
    try:
        steps["alone"] = make_step(task, networks.spiking(task, **options), way)
        steps["together"] = make_step(task, networks.spiking(task, **options, wrap=wrap), way)
    except Exception as error:
        reason = first_line(error)
    if highest(int(bool(reason))):
        return {"status": "unavailable", "reason": reason or "another process failed"}
    try:
        verify(task, **steps)
    except AssertionError as error:
        reason = str(error)
    if highest(int(bool(reason))):
        return {"status": "wrong", "reason": reason or "another process is wrong"}
    row: Record = {"status": "ok"}
    clock = GpuClock(device) if device.type == "cuda" else CpuClock()
    for name, one in steps.items():
        memory = clock.memory(Contender(name, one.step, held_bytes=one.held_bytes))
        row |= {f"{name}_bytes": value for kind, value in memory.items() if kind == "peak_bytes"}
    times: dict[str, list[float]] = {name: [] for name in steps}
    repetitions = 1 if args.quick else REPETITIONS
    for _ in range(args.rounds):
        for name, one in steps.items():
            taken = 0
            if processes.main or name == "together":
                taken = nanoseconds(one.step, device, repetitions)
            # `highest` lets the other processes wait for the first.
            times[name].append(highest(taken) / repetitions / 1e6)
    one_ms, all_ms = spread(times["alone"]), spread(times["together"])
    images = processes.count * task.workload.batch / all_ms["median"] * 1e3
    return row | {
        "alone_ms": one_ms,
        "together_ms": all_ms,
        "images_per_second": round(images, 1),
        "throughput": round(processes.count * one_ms["median"] / all_ms["median"], 4),
    }


def nanoseconds(step: Callable[[], StepResult], device: torch.device, repetitions: int) -> int:
    """Time some steps, after one that is not counted."""
    step()
    synchronize(device)
    start = time.perf_counter_ns()
    for _ in range(repetitions):
        step()
    synchronize(device)
    return time.perf_counter_ns() - start


def describe(row: Record) -> str:
    text = f"{row['processes']} processes, {row['network']}, {row['way']}: "
    if row["status"] != "ok":
        return text + f"{row['status']}, {row['reason']}"
    return text + (
        f"{row['together_ms']['median']:.3f} ms, one alone {row['alone_ms']['median']:.3f} ms, "
        f"{row['throughput']:.3f} times its throughput"
    )


# Shared with other benchmarks of several processes


def run_processes(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    rows: Callable[[argparse.Namespace, torch.device], Iterator[Record]],
    describe: Callable[[Record], str],
    plot: Callable[[Record, Path], Any] | None = None,
) -> Path | None:
    """Measure rows in all processes that torchrun started; the main process writes them."""
    processes, path = Processes.started(), None
    if processes.count < 2:
        parser.error(f"start it with torchrun --nproc_per_node N -m benchmarks.{args.name}, N >= 2")
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", processes.local_rank)
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True  # as in the trainer
        # NCCL's error handling would query events while a graph is recorded.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    settings = runner.settings_of(args) | {"processes": processes.count}
    with processes.connected(device):
        if processes.main:
            path = runner.write_rows(args, rows(args, device), describe, settings, plot=plot)
        else:
            deque(rows(args, device), maxlen=0)
    return path


def highest(value: int) -> int:
    """Return the largest value of all processes."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return max(values)


def averaging(net: nn.Module, device: torch.device, **options: Any) -> nn.Module:
    """Wrap a network in DistributedDataParallel so that its steps can be recorded."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with torch.cuda.stream(stream):
        model = DistributedDataParallel(net, **options)
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
    return model


if __name__ == "__main__":
    main()
