"""Time and memory as in the figures of *bptt-on-gpu*: Liang et al., "Accelerating Spatiotemporal
Supervised Training of Large-Scale Spiking Neural Networks on GPU".

    python -m benchmarks.bptt_figures

The paper's networks and neurons for CIFAR-10, float32 (with TF32 convolutions, as PyTorch's
default), channels-last, SGD. Our kernels take the place of the paper's, torch.compile of the loop
over time that of TorchScript. Steps are verified as in benchmarks.networks, run eagerly, and
timed by the clock; memory is what a training step needs beyond weights, optimizer and input.

- Fig. 3: the eager loop over T, with and without neurons and batch norm (medium network)
- Fig. 7: the eager loop against ours, over T and the size of the network, without batch norm (a)
  and with it (b); beyond the paper, over the batch too
- Fig. 8: what memory holds and what time goes into (medium network, T = 10)
- Fig. 9: forward only, by the eager loop, torch.compile and ours
- Fig. 10: AlexNet and ResNet34 on ImageNet's shape by one and two GPUs, from what
  `torchrun --nproc_per_node 2 -m benchmarks.ddp --workload resnet34-imagenet` has left

Without a GPU it is a trial of the script, on small shapes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import bptt_plots, lif, networks, record, series, steps
from benchmarks.runner import Clock, CpuClock, GpuClock, Settings, kernel_times
from benchmarks.steps import CONVOLUTIONS, EAGER, EAGERLY, FUSED, NETWORKS, OURS
from benchmarks.workloads import WORKLOADS, Task, Workload

COMMAND = "python -m benchmarks.bptt_figures"
SIZES = ("small", "medium", "large")
STEPS, BATCHES = (10, 6, 2), (32, 16, 128)
USUAL_STEPS, USUAL_BATCH = 10, 64
DTYPE = "float32"
# In the names of kernels that compute convolutions and linear layers.
PRODUCTS = ("conv", "gemm", "xmma", "cutlass", "cudnn", "wgrad", "dgrad", "fprop", "splitk")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = series.parser("bptt_figures", __doc__, rounds=3, within=150.0)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    return series.parse(parser, argv)


@dataclass(frozen=True)
class Row:
    """One measurement: a network, and which kind of step."""

    size: str
    T: int
    batch: int
    norms: bool = True
    kind: str = "training"

    @property
    def title(self) -> str:
        norms = "" if self.norms else " without batch norm"
        return f"{self.size}{norms}, T={self.T}, batch {self.batch}, {self.kind}"

    @property
    def names(self) -> tuple[str, ...]:
        """Its contenders."""
        if self.kind == "forward":
            return FUSED, lif.COMPILED, EAGER
        if not self.norms:
            return OURS, EAGER
        return (FUSED, EAGER, CONVOLUTIONS) if self.size == "medium" else (FUSED, EAGER)

    def workload(self, quick: bool) -> Workload:
        usual = replace(WORKLOADS[f"{self.size}-cifar10"], optimizer="sgd", norms=self.norms)
        if quick:
            return replace(usual.small(), T=min(self.T, 3))
        return replace(usual, T=self.T, batch=self.batch)


def rows(sizes: list[str]) -> Iterator[Row]:
    for size in sizes:
        yield Row(size, USUAL_STEPS, USUAL_BATCH, kind="forward")
    for T in STEPS:
        for size in sizes:
            for norms in (True, False):
                yield Row(size, T, USUAL_BATCH, norms)
    if "medium" in sizes:
        for batch in BATCHES:
            yield Row("medium", USUAL_STEPS, batch)


def main(argv: list[str] | None = None) -> Path:
    args = arguments(argv)
    device = torch.device(args.device)
    clock = GpuClock(device, warmup=1, singles=1) if device.type == "cuda" else CpuClock()
    turns = Settings(args.rounds, slot_ms=0.5 if args.quick else 25.0, warmup=2)
    measure = partial(measure_one, device, clock, turns, args.quick)
    with networks.searching(device):
        path = series.run(args, rows(args.sizes), measure, networks.progress, lambda *_: [])
    drawn = bptt_plots.figures(
        record.read(path), ddp_results(path.parent), path.with_suffix(".png")
    )
    print(f"drew {drawn}" if drawn else "no plot: matplotlib is not installed")
    return path


def ddp_results(folder: Path) -> list[dict[str, Any]]:
    """What benchmarks.ddp has found for Fig. 10."""
    found = (record.read(path) for path in sorted(folder.glob("ddp_*-imagenet-*.json")))
    return [result for result in found if not result["quick"]]


def measure_one(
    device: torch.device, clock: Clock, turns: Settings, quick: bool, row: Row
) -> dict[str, Any]:
    task = Task(row.workload(quick), DTYPE, device)
    found = networks.compare(task, row.kind, row.names, (EAGERLY,), clock, turns)
    about = {"row": row.title, "size": row.size, "T": row.T, "batch": row.batch}
    about |= {"norms": row.norms, "steps": row.kind, "dtype": DTYPE}
    if row == Row("medium", USUAL_STEPS, USUAL_BATCH):
        for contender in found["contenders"]:
            if contender["status"] == "ok":
                contender["breakdown"] = breakdown(task, contender["network"])
    return about | found


def breakdown(task: Task, name: str) -> dict[str, float]:
    """Of a training step, on a GPU: the bytes of weights and optimizer, and those kept by forward;
    milliseconds in convolutions and linear layers, and in other kernels."""
    if task.device.type != "cuda":
        return {}
    network = NETWORKS[name](task)
    step = steps.training(task, network)
    times = kernel_times(step, task.device)
    products = sum(t for n, t in times if any(part in n.lower() for part in PRODUCTS))
    # Each weight has a momentum; its gradient is a part of the peak.
    weights = 2 * sum(p.nbytes for p in network.net.parameters())
    before = torch.cuda.memory_allocated(task.device)
    with task.autocast():
        logits = network.call(task.x).mean(0, dtype=torch.float32)
        loss = F.cross_entropy(logits, task.labels)
    kept = torch.cuda.memory_allocated(task.device) - before
    del logits, loss
    return {
        "weight_bytes": weights,
        "kept_bytes": kept,
        "product_ms": round(products / 1e3, 4),
        "other_ms": round(sum(t for _, t in times) / 1e3 - products / 1e3, 4),
    }


if __name__ == "__main__":
    main()
