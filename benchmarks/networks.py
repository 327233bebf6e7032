"""Whole training steps and evaluation steps of whole networks on one GPU.

    python -m benchmarks.networks                    Spiking-ResNets at MNIST's and CIFAR-10's shape
    python -m benchmarks.networks --workloads large-cifar10 alexnet-imagenet --name more_networks

Every contender has the same weights, input and layout (channels-last), and runs in two ways:
eagerly, and as the replay of a CUDA graph of the whole step, which hides what Python costs. A
training step is forward, the cross entropy of the mean over time, backward, and a step of a fused
optimizer; an evaluation step is forward without gradients and the classes. float32 has TF32
convolutions, as PyTorch's default; bfloat16 is by autocast, as in the trainer.

SpikingJelly takes part where it is installed: as its users write it, and by the function that its
modules call, on views of the same tensors. "ReLU and batch norm" is the same network with ReLUs in
place of the neurons, on T times the batch; "convolutions alone" leaves the norms out too.

Memory is what a step needs beyond weights, optimizer and input: at its peak, or the growth of a
graph's pool. Without a GPU it is a trial of the script, on small shapes.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import record, steps
from benchmarks.agreement import Agreement, Reference
from benchmarks.runner import (
    Clock,
    Contender,
    CpuClock,
    GpuClock,
    Settings,
    first_line,
    measure,
)
from benchmarks.steps import EAGERLY, GRAPH, NETWORKS, STEPS, WAYS, Network, Result
from benchmarks.workloads import DTYPES, RESNETS, WORKLOADS, Task

# For the Spiking-ResNets: wall-clock time over that of SpikingJelly's best in the same way.
BARS = {
    ("training", EAGERLY): 0.7,
    ("training", GRAPH): 0.95,
    ("evaluation", EAGERLY): 0.6,
    ("evaluation", GRAPH): 0.6,
}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.networks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=WORKLOADS,
        metavar="WORKLOAD",
        help=f"of {', '.join(WORKLOADS)} (the first {len(RESNETS)})",
    )
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument(
        "--also",
        nargs="+",
        choices=steps.ONLY_IF_ASKED,
        default=[],
        metavar="CONTENDER",
        help=f"slow ones: {', '.join(steps.ONLY_IF_ASKED)}",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, help="turns of each contender (5)")
    parser.add_argument("--within", type=float, default=190.0, help="seconds; later rows left out")
    parser.add_argument("--name", default="networks", help="of the result; another keeps that one")
    parser.add_argument("--out", type=Path, help="folder for the result (benchmarks/results)")
    parser.add_argument("--quick", action="store_true", help="a trial: small shapes, few rounds")
    args = parser.parse_args(argv)
    args.workloads = args.workloads or list(RESNETS)[: 1 if args.quick else None]
    args.rounds = args.rounds or (2 if args.quick else 5)
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    if args.device == "cpu" and not args.quick:
        parser.error("the rows are sized for a GPU: add --quick for a trial on the CPU")
    return args


@dataclass(frozen=True)
class Row:
    """One measurement: a workload, a precision, and which kind of step."""

    workload: str
    dtype: str
    steps: str

    @property
    def title(self) -> str:
        return f"{self.workload}, {self.dtype}, {self.steps}"


@dataclass(frozen=True)
class Plan:
    """What all rows of a run share."""

    device: torch.device
    clock: Clock
    turns: Settings
    names: tuple[str, ...]
    quick: bool


def rows(args: argparse.Namespace) -> Iterator[Row]:
    for workload in args.workloads:
        for dtype in args.dtype:
            for kind in args.steps:
                yield Row(workload, dtype, kind)


def main(argv: list[str] | None = None) -> Path:
    args = arguments(argv)
    device = torch.device(args.device)
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "quick", "device", "name")}
    result = record.document(args.name, device, args.quick, settings)
    plan = Plan(
        device,
        # A step is long: what other contenders have left in caches matters little to it.
        GpuClock(device, warmup=1, singles=1) if device.type == "cuda" else CpuClock(),
        Settings(args.rounds, slot_ms=0.5 if args.quick else 25.0, warmup=2),
        tuple(n for n in NETWORKS if n not in steps.ONLY_IF_ASKED or n in args.also),
        args.quick,
    )
    into = record.folder(args.out, args.quick)
    result |= {"rows": [], "left_out": [], "bars": []}
    started = time.perf_counter()
    searching = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = device.type == "cuda"  # as the trainer sets it
    try:
        for row in rows(args):
            seconds = time.perf_counter() - started
            found, said = attempt(plan, row, args.within - seconds)
            print(f"[{seconds:.0f} s] {said}", flush=True)
            if found is None:
                result["left_out"].append({"row": row.title, "reason": said.partition(": ")[2]})
            else:
                result["rows"].append(found)
            if device.type == "cuda" and not args.quick:
                result["bars"] += bars(row, found)
            path = record.write(into, result)  # now: a later row may end the process
    finally:
        torch.backends.cudnn.benchmark = searching
    record.print_bars(result["bars"])
    print(f"wrote {path}, {time.perf_counter() - started:.0f} s")
    return path


def attempt(plan: Plan, row: Row, seconds: float) -> tuple[dict[str, Any] | None, str]:
    """A row's result and what to print; no result where it fails or no time is left."""
    if seconds <= 0:
        return None, f"{row.title}: left out, the time is up"
    try:
        found = measure_one(plan, row)
    except Exception as error:  # whatever it is: the other rows are still measured
        return None, f"{row.title}: left out, {first_line(error)}"
    finally:
        gc.collect()  # graphs and their memory, which the next row needs in other sizes
        if plan.device.type == "cuda":
            torch.cuda.empty_cache()
    return found, progress(row, found)


@dataclass(frozen=True)
class Entrant:
    """A network that runs in one way, with weights of its own; without one where it cannot."""

    name: str
    way: str
    contender: Contender
    network: Network | None = None


def absent(name: str, way: str, reason: str) -> Entrant:
    return Entrant(name, way, Contender(f"{name}, {way}", unavailable=reason))


def entrant(task: Task, kind: str, name: str, way: str) -> Entrant:
    if way == GRAPH and task.device.type != "cuda":
        return absent(name, way, steps.NO_GRAPHS)
    try:
        network = NETWORKS[name](task)
        run, held = STEPS[kind](task, network), 0
        if way == GRAPH:
            run, held = steps.graphed(run)
    except Exception as error:  # whatever it is: the reason is the result
        return absent(name, way, first_line(error))
    contender = Contender(f"{name}, {way}", run, note=network.note, held_bytes=held)
    return Entrant(name, way, contender, network)


def measure_one(plan: Plan, row: Row) -> dict[str, Any]:
    workload = WORKLOADS[row.workload]
    task = Task(workload.small() if plan.quick else workload, row.dtype, plan.device)
    reference = Reference.of(task, row.steps)
    num_spikes = reference.num_spikes
    agreements: dict[str, Agreement] = {}
    entrants: list[Entrant] = []
    for name in plan.names:
        try:
            agreements[name] = Agreement(task, row.steps, NETWORKS[name], reference)
        except Exception as error:  # whatever it is: the reason is the result
            entrants += [absent(name, way, first_line(error)) for way in WAYS]
        else:
            entrants += [entrant(task, row.steps, name, way) for way in WAYS]
    del reference  # its spikes are not needed any more
    by_contender = {e.contender.name: e for e in entrants}

    def verify(contender: Contender, result: Result) -> None:
        agreements[by_contender[contender.name].name].verify(result, task.labels)

    def prepare() -> None:
        for one in entrants:
            if one.network is not None:
                task.restore(one.network.net)

    contenders = [e.contender for e in entrants]
    measured = measure(contenders, [], verify, plan.clock, 0, plan.turns, prepare)
    for contender in measured["contenders"]:
        one = by_contender[contender["name"]]
        contender |= {"network": one.name, "way": one.way}
    return {
        "row": row.title,
        "workload": row.workload,
        "steps": row.steps,
        "dtype": row.dtype,
        "model": task.workload.model,
        "T": task.workload.T,
        "batch": task.workload.batch,
        "shape": list(task.workload.shape),
        "optimizer": task.workload.optimizer,
        "input_bytes": task.x.nbytes,
        "weight_bytes": sum(value.nbytes for value in task.state.values()),
        "spikes": num_spikes,
        "agreement": {name: agreement.about() for name, agreement in agreements.items()},
        "contenders": measured["contenders"],
    }


def progress(row: Row, found: dict[str, Any]) -> str:
    lines = [f"{row.title}: {found['spikes']:,} neuron-steps compared"]
    for name, about in found["agreement"].items():
        errors = "".join(f", {what} {error:.2g}" for what, error in about["errors"].items())
        lines.append(f"{name}: {about['flips']} flips{errors}, spread {about['spread']:.2g}")
    for c in found["contenders"]:
        if c["status"] != "ok":
            lines.append(f"{c['name']}: {c['status']}, {c['reason']}")
            continue
        kinds = [k for k in ("wall_ms", "device_ms") if k in c]
        text = f"{c['name']}: " + ", ".join(
            f"{k.replace('_', ' ')} {c[k]['median']:.3f}" for k in kinds
        )
        if "peak_bytes" in c:
            text += f", {c['peak_bytes'] / 2**20:,.0f} MiB"
        lines.append(text)
    return "\n    ".join(lines)


def bars(row: Row, found: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The project's own bars for a row; what could not be measured is None, and missed."""
    made = []
    for way in WAYS if row.workload in RESNETS else ():
        ours, rival = median(found, (steps.OURS,), way), median(found, steps.RIVALS, way)
        ratio = None if ours is None or rival is None else ours / rival
        what = f"{row.title}, {way}: over SpikingJelly's best"
        made.append(record.bar(what, ratio, BARS[row.steps, way], at_least=False))
    return made


def median(found: dict[str, Any] | None, names: tuple[str, ...], way: str) -> float | None:
    """Wall-clock milliseconds of the fastest of some contenders; None where none was measured."""
    times = [
        c["wall_ms"]["median"]
        for c in (found or {}).get("contenders", [])
        if c["status"] == "ok" and c["network"] in names and c["way"] == way
    ]
    return min(times, default=None)


if __name__ == "__main__":
    main()
