"""Whole training steps and evaluation steps of whole networks on one GPU.

    python -m benchmarks.networks                    Spiking-ResNets at MNIST's and CIFAR-10's shape
    python -m benchmarks.networks --workloads large-cifar10 alexnet-imagenet --name networks_more

Every contender has the same weights, input and layout (channels-last), and runs in two ways:
eagerly, and as the replay of a CUDA graph of the whole step, which hides what Python costs. A
training step is forward, the cross entropy of the mean over time, backward, and a step of a fused
optimizer; an evaluation step is forward without gradients and the classes. float32 has TF32
convolutions, as PyTorch's default; bfloat16 is by autocast, as in the trainer.

SpikingJelly takes part where it is installed: as its users write it, and by the function that its
modules call, on views of the same tensors. "ReLU and batch norm" is the same network with ReLUs in
place of the neurons, on T times the batch; "convolutions alone" leaves the norms out too. Of the
fused network there are contenders for all memory policies, if asked for.

Memory is what a step needs beyond weights, optimizer and input: at its peak, or the growth of a
graph's pool. Without a GPU it is a trial of the script, on small shapes.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import bars, series, steps
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
from benchmarks.steps import GRAPH, NETWORKS, STEPS, WAYS, Network, Result
from benchmarks.workloads import DTYPES, RESNETS, WORKLOADS, Task

JUDGED = ("training", "evaluation")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = series.parser("networks", __doc__, rounds=5, within=190.0)
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=WORKLOADS,
        metavar="WORKLOAD",
        help=f"of {', '.join(WORKLOADS)} (the first {len(RESNETS)})",
    )
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(JUDGED))
    parser.add_argument(
        "--also",
        nargs="+",
        choices=steps.ONLY_IF_ASKED,
        default=[],
        metavar="CONTENDER",
        help=f"not always there: {', '.join(steps.ONLY_IF_ASKED)}",
    )
    parser.add_argument(
        "--only", nargs="+", choices=NETWORKS, metavar="CONTENDER", help="no others"
    )
    args = series.parse(parser, argv)
    args.workloads = args.workloads or list(RESNETS)[: 1 if args.quick else None]
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
    also: frozenset[str]
    only: frozenset[str]
    quick: bool

    def names(self, row: Row) -> list[str]:
        """Its contenders."""
        if self.only:
            return [name for name in NETWORKS if name in self.only]
        left_out = set(steps.ONLY_IF_ASKED) - self.also - bars.needed(row.workload, row.steps)
        return [name for name in NETWORKS if name not in left_out]


def rows(args: argparse.Namespace) -> Iterator[Row]:
    for workload in args.workloads:
        for dtype in args.dtype:
            for kind in args.steps:
                yield Row(workload, dtype, kind)


def main(argv: list[str] | None = None) -> Path:
    args = arguments(argv)
    device = torch.device(args.device)
    plan = Plan(
        device,
        # A step is long: what other contenders have left in caches matters little to it.
        GpuClock(device, warmup=1, singles=1) if device.type == "cuda" else CpuClock(),
        Settings(args.rounds, slot_ms=0.5 if args.quick else 25.0, warmup=2),
        frozenset(args.also),
        frozenset(args.only or ()),
        args.quick,
    )
    with searching(device):
        return series.run(args, rows(args), functools.partial(measure_one, plan), progress, judged)


@contextmanager
def searching(device: torch.device) -> Iterator[None]:
    """Inside, cuDNN looks for the fastest algorithms, as the trainer lets it."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = device.type == "cuda"
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def judged(row: Row, found: dict[str, Any] | None) -> list[dict[str, Any]]:
    return bars.of(row.title, row.workload, row.dtype, row.steps, found)


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
    } | compare(task, row.steps, plan.names(row), WAYS, plan.clock, plan.turns)


def compare(
    task: Task,
    kind: str,
    names: Sequence[str],
    ways: Sequence[str],
    clock: Clock,
    turns: Settings,
) -> dict[str, Any]:
    """The step of several networks, verified and timed."""
    reference = Reference.of(task, kind)
    num_spikes = reference.num_spikes
    agreements: dict[str, Agreement] = {}
    entrants: list[Entrant] = []
    fused = None
    for name in names:
        try:
            if name.startswith(steps.FUSED):
                fused = fused or Reference.of(task, kind, fused=True, other=reference)
                agreements[name] = Agreement(task, kind, NETWORKS[name], fused)
            else:
                agreements[name] = Agreement(task, kind, NETWORKS[name], reference)
        except Exception as error:  # whatever it is: the reason is the result
            entrants += [absent(name, way, first_line(error)) for way in ways]
        else:
            entrants += [entrant(task, kind, name, way) for way in ways]
    del reference, fused  # their spikes are not needed any more
    by_contender = {e.contender.name: e for e in entrants}

    def verify(contender: Contender, result: Result) -> None:
        agreements[by_contender[contender.name].name].verify(result, task.labels)

    def prepare() -> None:
        for one in entrants:
            if one.network is not None:
                task.restore(one.network.net)

    contenders = [e.contender for e in entrants]
    measured = measure(contenders, [], verify, clock, 0, turns, prepare)
    for contender in measured["contenders"]:
        one = by_contender[contender["name"]]
        contender |= {"network": one.name, "way": one.way}
    return {
        "spikes": num_spikes,
        "agreement": {name: agreement.about() for name, agreement in agreements.items()},
        "contenders": measured["contenders"],
    }


def progress(row: series.Titled, found: dict[str, Any]) -> str:
    lines = [f": {found['spikes']:,} neuron-steps compared"]
    for name, about in found["agreement"].items():
        errors = "".join(f", {what} {error:.2g}" for what, error in about["errors"].items())
        flips = f"{about['flips']} flips"
        if about["flip_rate"]:
            flips += f" (fusing turns {about['flip_rate']:.2g})"
        lines.append(f"{name}: {flips}{errors}, spread {about['spread']:.2g}")
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


if __name__ == "__main__":
    main()
