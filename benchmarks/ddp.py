"""Training steps of Spiking-ResNet18 by several GPUs, against those of one.

    torchrun --nproc_per_node 2 -m benchmarks.ddp
    torchrun --nproc_per_node 2 -m benchmarks.ddp --workload resnet34-imagenet

T = 32, batches of 100 per process, bfloat16, channels-last, by DistributedDataParallel over NCCL,
on CPUs over Gloo; the networks for ImageNet are compared with the eager loop. In turns, the first
process steps alone while the others wait, and all step together; eagerly, and as replays of a CUDA
graph. Together, the gradients have to be the mean of those that each process has alone. Throughput
is in images a second.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import bars, record, steps
from benchmarks.agreement import ROUNDING, apart
from benchmarks.ranks import STEPS_BEFORE_GRAPH, averaging
from benchmarks.runner import Contender, CpuClock, GpuClock, first_line, spread
from benchmarks.steps import EAGER, EAGERLY, FUSED, GRAPH, OURS, WAYS, Result
from benchmarks.workloads import DTYPES, WORKLOADS, Task
from spikefuse.train.processes import Processes

WORKLOAD = "resnet18-mnist"
SPIKING: dict[str, dict[str, Any]] = {
    FUSED: {"fused": True},
    OURS: {},
    EAGER: {"impl": "reference"},
}
# Times the throughput of one GPU, for two.
BAR_PROCESSES, BAR = 2, 1.85


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.ddp", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--workload", choices=WORKLOADS, default=WORKLOAD, metavar="WORKLOAD")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--networks", nargs="+", choices=SPIKING, metavar="NETWORK",
                        help=f"of {', '.join(SPIKING)}")  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, help="turns of one and of all (11)")
    parser.add_argument("--repetitions", type=int, help="steps in a turn (20)")
    parser.add_argument("--out", type=Path, help="folder for the result (benchmarks/results)")
    parser.add_argument("--quick", action="store_true", help="a trial: small images, few rounds")
    args = parser.parse_args(argv)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    usual = (FUSED, EAGER) if args.workload in bars.AGAINST_EAGER else (FUSED, OURS)
    args.networks = args.networks or list(usual)
    args.rounds = args.rounds or (2 if args.quick else 11)
    args.repetitions = args.repetitions or (1 if args.quick else 20)
    if min(args.rounds, args.repetitions) < 1:
        parser.error("--rounds and --repetitions must be at least 1")
    if Processes.started().count < 2:
        parser.error("start it with torchrun --nproc_per_node N -m benchmarks.ddp, N at least 2")
    return args


def main(argv: list[str] | None = None) -> Path | None:
    """The path of the result, in the process that writes it."""
    args = arguments(argv)
    processes = Processes.started()
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", processes.local_rank)
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True  # as the trainer sets it
        # It would query events while a graph is recorded.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "quick", "device")}
    settings["processes"] = processes.count
    with processes.connected(device):
        workload = WORKLOADS[args.workload]
        task = Task(workload.small() if args.quick else workload, args.dtype, device,
                    seed=processes.rank)  # fmt: skip
        rows = []
        for name in args.networks:
            for way in WAYS:
                rows.append(measure(task, name, way, processes, args))
                gc.collect()  # a graph may not outlive its connections
    if not processes.main:
        return None
    name = "ddp" if args.workload == WORKLOAD else f"ddp_{args.workload}"
    result = record.document(name, device, args.quick, settings)
    judged = device.type == "cuda" and processes.count == BAR_PROCESSES and not args.quick
    result |= {"rows": rows, "bars": judge(args.workload, rows) if judged else []}
    print("\n".join(progress(row) for row in rows), flush=True)
    record.print_bars(result["bars"])
    path = record.write(record.folder(args.out, args.quick), result)
    print(f"wrote {path}")
    return path


@dataclass(frozen=True)
class Runner:
    """A network and its training step."""

    net: nn.Module
    step: Callable[[], Result]
    held_bytes: int


def make(task: Task, name: str, way: str) -> tuple[Runner, Runner]:
    """The step of this process alone, and its part in that of all."""
    cuda = task.device.type == "cuda"

    def shared(net: nn.Module) -> nn.Module:
        return averaging(net, task.device, device_ids=[task.device] if cuda else None)

    kind = SPIKING[name]
    networks = (steps.spiking(task, **kind), steps.spiking(task, **kind, shared=shared))
    made = []
    for network in networks:
        step, held = steps.training(task, network), 0
        if way == GRAPH:
            step, held = steps.graphed(step, STEPS_BEFORE_GRAPH)
        made.append(Runner(network.net, step, held))
    return made[0], made[1]


def verify(task: Task, alone: Runner, together: Runner, processes: Processes) -> None:
    """Raises:
    AssertionError: what is wrong with the step of all.
    """
    for runner in (alone, together):
        task.restore(runner.net)
    expected = alone.step()
    means = [g.clone() for g in expected.grads]
    for mean in means:
        dist.all_reduce(mean)
        mean /= processes.count
    found = together.step()
    assert expected.loss is not None
    assert found.loss is not None
    allowed = ROUNDING[task.dtype]
    for what, error in (
        ("the loss", apart([found.loss], [expected.loss])),
        ("gradients", apart(found.grads, means)),
    ):
        assert error <= allowed, f"{what} differ by {error:.3g}, allowed is {allowed:g}"


def taken(step: Callable[[], Result], device: torch.device, repetitions: int) -> int:
    """Nanoseconds of some steps, after one that is not counted."""
    step()
    _wait(device)
    start = time.perf_counter_ns()
    for _ in range(repetitions):
        step()
    _wait(device)
    return time.perf_counter_ns() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    task: Task, name: str, way: str, processes: Processes, args: argparse.Namespace
) -> dict[str, Any]:
    """A row: verified, then timed in turns. What one process cannot do is left out in all."""
    about: dict[str, Any] = {"network": name, "way": way, "processes": processes.count}
    if way == GRAPH and task.device.type != "cuda":
        return about | {"status": "unavailable", "reason": steps.NO_GRAPHS}
    reason, made = "", None
    try:
        made = make(task, name, way)
    except Exception as error:  # whatever it is: the reason is the result
        reason = first_line(error)
    if processes.highest(int(made is None)):
        return about | {"status": "unavailable", "reason": reason or "another process failed"}
    assert made is not None
    alone, together = made
    try:
        verify(task, alone, together, processes)
    except AssertionError as error:
        reason = str(error)
    if processes.highest(int(bool(reason))):
        return about | {"status": "wrong", "reason": reason or "another process is wrong"}
    clock = GpuClock(task.device, flush_bytes=1) if task.device.type == "cuda" else CpuClock()
    for key, runner in (("alone_bytes", alone), ("together_bytes", together)):
        found = clock.memory(Contender(name, runner.step, held_bytes=runner.held_bytes))
        if found:
            about[key] = found["peak_bytes"]
    times: dict[str, list[float]] = {"alone": [], "together": []}
    for _ in range(args.rounds):
        # Where `highest` is asked, the others wait for the first.
        found = taken(alone.step, task.device, args.repetitions) if processes.main else 0
        times["alone"].append(processes.highest(found) / args.repetitions / 1e6)
        found = taken(together.step, task.device, args.repetitions)
        times["together"].append(processes.highest(found) / args.repetitions / 1e6)
    one, several = spread(times["alone"]), spread(times["together"])
    images = processes.count * task.workload.batch / several["median"] * 1e3
    return about | {
        "status": "ok",
        "alone_ms": one,
        "together_ms": several,
        "images_per_second": round(images, 1),
        "throughput": round(processes.count * one["median"] / several["median"], 4),
    }


def progress(row: dict[str, Any]) -> str:
    said = f"{row['processes']} processes, {row['network']}, {row['way']}: "
    if row["status"] != "ok":
        return said + f"{row['status']}, {row['reason']}"
    return said + (
        f"{row['together_ms']['median']:.3f} ms, one alone {row['alone_ms']['median']:.3f} ms, "
        f"{row['throughput']:.3f} times its throughput"
    )


def judge(workload: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The project's own bars for the fused network; where nothing was measured, one is missed."""
    found = {(row["network"], row["way"]): row for row in rows}
    made = []

    def over_eager(way: str, value: Callable[[dict[str, Any]], float]) -> float | None:
        pair = [found.get((name, way), {}) for name in (FUSED, EAGER)]
        right = all(row.get("status") == "ok" for row in pair)
        return value(pair[0]) / value(pair[1]) if right else None

    for way in WAYS:
        where = f"{BAR_PROCESSES} GPUs, {way}: "
        if workload == WORKLOAD:
            share = found.get((FUSED, way), {}).get("throughput")
            made.append(record.bar(f"{where}times the throughput of one", share, BAR))
        if workload in bars.AGAINST_EAGER:
            share = over_eager(way, lambda row: row["together_ms"]["median"])
            what = f"{where}{workload}, time over the eager loop"
            made.append(record.bar(what, share, bars.EAGER_TIME, at_least=False))
    if workload in bars.AGAINST_EAGER:
        share = over_eager(EAGERLY, lambda row: row["together_bytes"])
        what = f"{BAR_PROCESSES} GPUs: {workload}, memory over the eager loop"
        made.append(record.bar(what, share, bars.EAGER_MEMORY, at_least=False))
    return made


if __name__ == "__main__":
    main()
