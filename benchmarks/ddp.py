"""Training steps on several GPUs by DistributedDataParallel, against steps on one GPU.

    torchrun --nproc_per_node 2 -m benchmarks.ddp
    torchrun --nproc_per_node 2 -m benchmarks.ddp --workload resnet34-imagenet

T = 32, batches of 100 per process, bfloat16, channels-last, over NCCL, on CPUs over Gloo. Networks
for ImageNet are compared with the eager loop. In turns, the first process steps alone while the
others wait, and all step together; eagerly, and as replays of a CUDA graph. Together, gradients
must be the mean of those that each process computes alone.
"""

from __future__ import annotations

import argparse
import functools
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import network_steps, record, runner
from benchmarks.agreement import ROUNDING, difference
from benchmarks.layers import DTYPES, LOOP, OURS
from benchmarks.network_steps import FUSED, NO_GRAPHS, WAYS, WORKLOADS, StepResult, Task
from benchmarks.ranks import averaging, rank_device
from benchmarks.runner import GRAPH, Contender, CpuClock, GpuClock, first_line, spread
from spikefuse.train.processes import Processes

WORKLOAD = "resnet18-mnist"
SPIKING: dict[str, dict[str, Any]] = {
    FUSED: {"fused": True},
    OURS: {},
    LOOP: {"impl": "reference"},
}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = runner.make_parser("ddp", __doc__)
    parser.add_argument("--workload", choices=WORKLOADS, default=WORKLOAD, metavar="WORKLOAD")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--networks", nargs="+", choices=SPIKING, metavar="NETWORK",
                        help=f"of {', '.join(SPIKING)}")  # fmt: skip
    parser.add_argument("--repetitions", type=int, help="steps in a turn (20)")
    args = runner.parse(parser, argv)
    usual = (FUSED, LOOP) if args.workload.endswith("-imagenet") else (FUSED, OURS)
    args.networks = args.networks or list(usual)
    args.repetitions = args.repetitions or (1 if args.quick else 20)
    if Processes.started().count < 2:
        parser.error("start it with torchrun --nproc_per_node N -m benchmarks.ddp, N at least 2")
    return args


def main(argv: list[str] | None = None) -> Path | None:
    """Measure; return the path of the result in the main process."""
    args, processes = arguments(argv), Processes.started()
    device = rank_device(args.device, processes)
    name = "ddp" if args.workload == WORKLOAD else f"ddp_{args.workload}"
    settings = runner.settings_of(args) | {"processes": processes.count}
    result = record.document(name, device, args.quick, settings) | {"rows": []}
    with processes.connected(device):
        workload = WORKLOADS["conv-mnist"].small() if args.quick else WORKLOADS[args.workload]
        task = Task(workload, args.dtype, device, seed=processes.rank)
        for name in args.networks:
            for way in WAYS:
                row = measure_step(task, SPIKING[name], way, args)
                row = {"network": name, "way": way, "processes": processes.count} | row
                result["rows"].append(row)
                if processes.main:
                    print(describe(row), flush=True)
                gc.collect()  # a graph must not outlive its connections
    if not processes.main:
        return None
    path = record.write(record.folder(args.out, args.quick), result)
    print(f"wrote {path}")
    return path


@dataclass(frozen=True)
class RankStep:
    """A network, its training step, and the memory that a graph of it holds."""

    net: nn.Module
    step: Callable[[], StepResult]
    held_bytes: int = 0


def make_steps(task: Task, options: dict[str, Any], way: str) -> tuple[RankStep, RankStep]:
    """Make the step of this process alone, and its part in the step of all."""
    ids = [task.device] if task.device.type == "cuda" else None
    wrap = functools.partial(averaging, device=task.device, device_ids=ids)
    made = []
    for network in (
        network_steps.spiking(task, **options),
        network_steps.spiking(task, **options, wrap=wrap),
    ):
        step, held = network_steps.training(task, network), 0
        if way == GRAPH:
            step, held = network_steps.record_graph(step)
        made.append(RankStep(network.net, step, held))
    return made[0], made[1]


def verify(task: Task, alone: RankStep, together: RankStep) -> None:
    """Compare the step of all processes with the steps of each process alone.

    Raises:
        AssertionError: the loss or the gradients differ.
    """
    for one in (alone, together):
        task.restore(one.net)
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


def measure_step(
    task: Task, options: dict[str, Any], way: str, args: argparse.Namespace
) -> dict[str, Any]:
    """Verify a step, then time it in turns. If one process fails, all report it."""
    if way == GRAPH and task.device.type != "cuda":
        return {"status": "unavailable", "reason": NO_GRAPHS}
    processes, reason, made = Processes.started(), "", None
    try:
        made = make_steps(task, options, way)
    except Exception as error:
        reason = first_line(error)
    if processes.highest(int(made is None)):
        return {"status": "unavailable", "reason": reason or "another process failed"}
    assert made is not None
    alone, together = made
    try:
        verify(task, alone, together)
    except AssertionError as error:
        reason = str(error)
    if processes.highest(int(bool(reason))):
        return {"status": "wrong", "reason": reason or "another process is wrong"}
    row: dict[str, Any] = {"status": "ok"}
    clock = GpuClock(task.device) if task.device.type == "cuda" else CpuClock()
    for key, one in (("alone_bytes", alone), ("together_bytes", together)):
        found = clock.memory(Contender(key, one.step, held_bytes=one.held_bytes))
        if found:
            row[key] = found["peak_bytes"]
    times: dict[str, list[float]] = {"alone": [], "together": []}
    for _ in range(args.rounds):
        # `highest` lets the other processes wait for the first.
        found = nanoseconds(alone.step, task.device, args.repetitions) if processes.main else 0
        times["alone"].append(processes.highest(found) / args.repetitions / 1e6)
        found = nanoseconds(together.step, task.device, args.repetitions)
        times["together"].append(processes.highest(found) / args.repetitions / 1e6)
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

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    step()
    wait()
    start = time.perf_counter_ns()
    for _ in range(repetitions):
        step()
    wait()
    return time.perf_counter_ns() - start


def describe(row: dict[str, Any]) -> str:
    text = f"{row['processes']} processes, {row['network']}, {row['way']}: "
    if row["status"] != "ok":
        return text + f"{row['status']}, {row['reason']}"
    return text + (
        f"{row['together_ms']['median']:.3f} ms, one alone {row['alone_ms']['median']:.3f} ms, "
        f"{row['throughput']:.3f} times its throughput"
    )


if __name__ == "__main__":
    main()
