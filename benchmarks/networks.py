"""Training and evaluation steps of whole networks on one GPU.

    python -m benchmarks.networks                    Spiking-ResNets at MNIST's and CIFAR-10's shape
    python -m benchmarks.networks --name networks_imagenet --also "eager loop" \\
        --workloads alexnet-imagenet resnet34-imagenet
    python -m benchmarks.networks --name bptt_figures --also "eager loop" --steps training \\
        --workloads small-cifar10 medium-cifar10 large-cifar10 --T 2 6 10

All contenders have the same weights, input and layout (channels-last). Each runs in two ways:
eagerly, and as the replay of a CUDA graph of the whole step, which hides the cost of Python. A
training step is forward, the cross entropy of the mean over time, backward, and a step of a fused
optimizer; an evaluation step is forward without gradients, and the classes. float32 has TF32
convolutions, PyTorch's default; bfloat16 is by autocast, as in the trainer.

SpikingJelly is measured if it is installed, by its modules and by its function with a float32 state
on views of the same tensors. "ReLU and batch norm" is the same network with ReLUs in place of
neurons, on T times the batch; "convolutions alone" has no norms either. The fused network is
available with every memory policy.

Memory is what a step needs beyond weights, optimizer and input: at its peak, or the growth of the
graph's pool.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import runner
from benchmarks.agreement import Agreement, NetworkReference
from benchmarks.layers import DTYPES
from benchmarks.network_steps import (
    FUSED,
    NETWORKS,
    NO_GRAPHS,
    OPTIONAL,
    RESNETS,
    STEPS,
    WAYS,
    WORKLOADS,
    Network,
    StepResult,
    Task,
    Workload,
    graph_contender,
)
from benchmarks.runner import EAGER, Contender, Timing, first_line, measure


@dataclass(frozen=True)
class NetworkRow:
    """One measurement; `T` and `batch` override those of the workload."""

    name: str
    dtype: str
    steps: str
    T: int | None = None
    batch: int | None = None

    @property
    def label(self) -> str:
        sizes = {"T": self.T, "batch": self.batch}
        return self.name + "".join(f", {k} = {v}" for k, v in sizes.items() if v is not None)

    @property
    def title(self) -> str:
        return f"{self.label}, {self.dtype}, {self.steps}"

    def workload(self, quick: bool) -> Workload:
        workload = WORKLOADS[self.name]
        sizes = {"T": self.T or workload.T, "batch": self.batch or workload.batch}
        return workload.small() if quick else replace(workload, **sizes)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = runner.make_parser("networks", __doc__, rounds=5)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, metavar="WORKLOAD",
                        help=f"of {', '.join(WORKLOADS)} (the ResNets)")  # fmt: skip
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--T", nargs="+", type=int, default=[None], help="other time steps")
    parser.add_argument("--batch", nargs="+", type=int, default=[None], help="other batch sizes")
    parser.add_argument("--also", nargs="+", choices=OPTIONAL, default=[], metavar="CONTENDER",
                        help=f"of {', '.join(OPTIONAL)}")  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=NETWORKS, metavar="CONTENDER")
    parser.add_argument("--within", type=float, default=1e9, help="seconds; skip later rows")
    parser.add_argument("--name", help="name of the result (networks)")
    args = runner.parse(parser, argv)
    args.workloads = args.workloads or (["conv-mnist"] if args.quick else list(RESNETS))
    args.only = args.only or [n for n in NETWORKS if n not in OPTIONAL or n in args.also]
    return args


def main(argv: list[str] | None = None) -> Path:
    args = arguments(argv)
    rows = (
        NetworkRow(name, dtype, kind, T, batch)
        for name in args.workloads
        for T in args.T
        for batch in args.batch
        for dtype in args.dtype
        for kind in args.steps
    )
    timing = Timing.of(args, whole_steps=True)
    with cudnn_search(torch.device(args.device)):
        return runner.run_rows(args, rows, partial(measure_row, args, timing))


@contextmanager
def cudnn_search(device: torch.device) -> Iterator[None]:
    """Let cuDNN search for the fastest algorithms, as the trainer does."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = device.type == "cuda"
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def measure_row(args: argparse.Namespace, timing: Timing, row: NetworkRow) -> dict[str, Any]:
    task = Task(row.workload(args.quick), row.dtype, torch.device(args.device))
    return {
        "row": row.title,
        "workload": row.label,
        "steps": row.steps,
        "dtype": row.dtype,
        "model": task.workload.model,
        "T": task.workload.T,
        "batch": task.workload.batch,
        "shape": list(task.workload.shape),
        "optimizer": task.workload.optimizer,
        "input_bytes": task.x.nbytes,
        "weight_bytes": sum(value.nbytes for value in task.state.values()),
    } | compare(task, row.steps, args.only, timing)


def compare(task: Task, kind: str, names: Sequence[str], timing: Timing) -> dict[str, Any]:
    """Verify and time the step of several networks."""
    reference = NetworkReference.of(task, kind)
    fused: NetworkReference | None = None
    num_spikes = reference.num_spikes
    agreements: dict[str, Agreement] = {}
    networks: list[Network] = []
    contenders: dict[str, tuple[str, str, Contender]] = {}
    for name in names:
        try:
            if name.startswith(FUSED) and fused is None:
                fused = NetworkReference.of(task, kind, reference)
            own = fused if name.startswith(FUSED) else reference
            agreements[name] = Agreement(task, kind, NETWORKS[name], own)
            reason = ""
        except Exception as error:  # the others are still measured
            reason = first_line(error)
        for way in WAYS:
            title = f"{name}, {way}"
            contender = Contender(title, unavailable=reason or NO_GRAPHS)
            if not reason and (way == EAGER or task.device.type == "cuda"):
                network = NETWORKS[name](task)
                step = STEPS[kind](task, network)
                run = Contender(title, step)
                contender = run if way == EAGER else graph_contender(title, step, task.device)
                contender.note = network.note
                networks.append(network)
            contenders[title] = name, way, contender
    for agreement in agreements.values():
        agreement.forget_spikes()

    def verify(contender: Contender, result: StepResult) -> None:
        agreements[contenders[contender.name][0]].verify(result)

    def prepare() -> None:
        for network in networks:
            task.restore(network.net)

    measured = measure([c for _, _, c in contenders.values()], verify, timing, prepare=prepare)
    for found in measured["contenders"]:
        found["network"], found["way"], _ = contenders[found["name"]]
    about = {name: agreement.about() for name, agreement in agreements.items()}
    return {"spikes": num_spikes, "agreement": about, "contenders": measured["contenders"]}


if __name__ == "__main__":
    main()
