"""Training steps of Spiking-ResNet18 whose time several ranks share, eagerly and as CUDA graphs."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import spikefuse as sf
from benchmarks.agreement import ROUNDING, apart
from benchmarks.ranks import (
    STEPS_BEFORE_GRAPH,
    averaging,
    forecast,
    hand_on,
    highest,
    peak,
    predict,
    timed,
)
from benchmarks.runner import first_line
from benchmarks.steps import EAGERLY, GRAPH, graphed
from benchmarks.workloads import Workload
from spikefuse.distributed import (
    Plan,
    mean_over_steps,
    plan,
    shard_time,
    steps_of,
)

NETWORK = Workload("resnet18", (2, 128, 128), num_classes=11, T=128, batch=16)
# A replay may be so many times as far from an eager step as another eager one is.
SPREAD = 2.0

Row = dict[str, Any]
Meshes = dict[int, DeviceMesh]


class NetworkStep:
    """A training step of the network, norms and neurons fused, without its optimizer; it gives the
    gradients."""

    def __init__(
        self, workload: Workload, mesh: DeviceMesh | None, device: torch.device, **how: Any
    ) -> None:
        torch.manual_seed(0)
        net = sf.Temporal(workload.network(workload.neuron))
        net.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.net = sf.fuse(net)
        self.mesh, self.device = mesh, device
        self.model: nn.Module = self.net
        steps, rows = slice(0, workload.T), slice(0, workload.batch)
        if mesh is not None:
            time_axis, data = mesh["time"], mesh["data"]
            steps = steps_of(workload.T, time_axis.get_local_rank(), time_axis.size())
            rows = steps_of(workload.batch, data.get_local_rank(), data.size())
            if time_axis.size() > 1:
                shard_time(self.net, time_axis, **how)
            # Running statistics are each rank's own, or agree.
            options = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
            self.model = averaging(self.net, device, **options)
        count, size = steps.stop - steps.start, rows.stop - rows.start
        pixels = torch.randint(0, 3, (count * size, *workload.shape), device=device).float()
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        self.x = pixels.unflatten(0, (count, size))
        self.labels = torch.zeros(size, dtype=torch.int64, device=device)

    def __call__(self) -> list[Tensor]:
        for p in self.net.parameters():
            p.grad = None
        with torch.autocast(self.device.type, torch.bfloat16):
            y = self.model(self.x)
        mean = y.mean(0) if self.mesh is None else mean_over_steps(y, self.mesh["time"])
        F.cross_entropy(mean.float(), self.labels).backward()
        return [p.grad for p in self.net.parameters() if p.grad is not None]


def workload_of(args: argparse.Namespace) -> Workload:
    """A small one has just a step for each rank, and a sample."""
    if not args.quick:
        return NETWORK
    count = dist.get_world_size() if dist.is_initialized() else 1
    small = NETWORK.small()
    return replace(small, model="conv", T=max(small.T, count), batch=max(small.batch, count))


def rows_of(
    meshes: Meshes, device: torch.device, args: argparse.Namespace, way: str
) -> Iterator[Row]:
    """One GPU with all the work; all GPUs by every data x time; and k of them by time alone. All in
    one way, and compared with one GPU in this way."""
    workload, whole = workload_of(args), max(meshes)
    one = measure(workload, None, device, args, "exact", way)
    yield {**one, "time": 1, "data": 1, "speedup": 1.0, "memory_of_one": 1.0}
    for statistics in ("exact", "shard"):
        for k, mesh in meshes.items():
            if k > 1 or statistics == "exact":
                row = measure(workload, mesh, device, args, statistics, way)
                yield compared({**row, "time": k, "data": whole // k}, one)
            if 1 < k < whole:  # by time alone: each row of the mesh has all the work
                copies = replace(workload, batch=workload.batch * whole // k)
                row = measure(copies, mesh, device, args, statistics, way)
                yield compared({**row, "time": k, "data": 1, "batch": workload.batch}, one)


def handed_on(counts: Sequence[int]) -> list[tuple[int, bool]]:
    """(chunks, whether ranks begin before the state is there); chunks are for those that wait."""
    return [(1, True), *((chunks, False) for chunks in counts)]


def compared(row: Row, one: Row) -> Row:
    if row["status"] == "ok" and one["status"] == "ok":
        row["speedup"] = one["ms"]["median"] / row["ms"]["median"]
        row["memory_of_one"] = row["bytes"] / one["bytes"] if one["bytes"] else None
    return row


def measure(
    workload: Workload,
    mesh: DeviceMesh | None,
    device: torch.device,
    args: argparse.Namespace,
    statistics: str,
    way: str,
) -> Row:
    about = {"what": "network", "way": way, "T": workload.T, "batch": workload.batch,
             "statistics": statistics}  # fmt: skip
    size = 1 if mesh is None else mesh["time"].size()
    found: dict[tuple[int, bool], dict[str, Any]] = {}
    used, errors = 0, []
    gc.collect()  # of the row before
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    try:
        step = NetworkStep(workload, mesh, device, statistics=statistics)
        for how in handed_on(args.network_chunks) if size > 1 else ((1, True),):
            hand_on(step.net, *how)
            if way == EAGERLY:
                run, used = step, peak(step, device, before)
            else:
                run, used = recorded(step, device, before)
                errors.append(verify(step, run))
            found[how] = timed(run, device, args.rounds)
            del run
            gc.collect()  # of a graph its memory, before the next one
    except torch.OutOfMemoryError as error:
        return {**about, "status": "out of memory", "reason": first_line(error)}
    except AssertionError as error:
        return {**about, "status": "wrong", "reason": first_line(error)}
    except Exception as error:
        if way == EAGERLY:
            raise
        return {**about, "status": "unavailable", "reason": first_line(error)}
    best = chunks, speculate = min(found, key=lambda how: found[how]["median"])
    row = {**about, "status": "ok", "chunks": chunks, "speculate": speculate, "ms": found[best]}
    row |= {"bytes": used, "by_chunks": {}}
    for (chunks, speculate), ms in found.items():
        row["by_chunks"][f"{chunks}" if speculate else f"{chunks}, waiting"] = ms["median"]
    return row | ({"error": max(errors)} if errors else {})


def recorded(
    step: NetworkStep, device: torch.device, before: int
) -> tuple[Callable[[], list[Tensor]], int]:
    """The step's replay, and the bytes beyond those `before` that it needs on the rank that needs
    most."""
    used = torch.cuda.memory_allocated(device) - before
    run, held = graphed(step, STEPS_BEFORE_GRAPH)
    return run, int(highest(used + held, device))


def verify(step: NetworkStep, run: Callable[[], list[Tensor]]) -> float:
    """How far the gradients of a replay are from those of an eager step.

    Raises:
        AssertionError: too far, on all ranks.
    """
    expected = [g.clone() for g in step()]
    spread = apart(step(), expected)
    for grad in run():
        grad.fill_(torch.nan)
    error = apart(run(), expected)
    # What is no number is no agreement, and no rank may stop alone.
    error = highest(error if error == error else 1e9, step.device)
    allowed = max(ROUNDING["bfloat16"], SPREAD * highest(spread, step.device))
    assert error <= allowed, f"a replay is {error:.3g} from an eager step, allowed is {allowed:.3g}"
    return float(f"{error:.3g}")


def predicted(
    rows: list[Row], mesh: DeviceMesh, device: torch.device, args: argparse.Namespace
) -> None:
    """Add to the rows of networks what is predicted of them."""
    shared = [r for r in rows if r["what"] == "network" and r["time"] > 1]
    for way in dict.fromkeys(r["way"] for r in shared):
        for statistics in ("exact", "shard"):
            mine = [r for r in shared if (r["way"], r["statistics"]) == (way, statistics)]
            predict(mine, plan_of(workload_of(args), mesh, device, statistics, way))


def forecasts(
    mesh: DeviceMesh, device: torch.device, args: argparse.Namespace, way: str
) -> list[Row]:
    """Of twice as many steps, on more GPUs than there are."""
    workload, rows = replace(NETWORK, T=2 * NETWORK.T), []
    for statistics in ("exact", "shard"):
        about = {"what": "network", "way": way, "T": workload.T, "batch": workload.batch,
                 "statistics": statistics}  # fmt: skip
        made = plan_of(workload, mesh, device, statistics, way)
        rows += forecast(about, made, args.forecast, (1, 2, 4, 8))
    return rows


def plan_of(
    workload: Workload, mesh: DeviceMesh, device: torch.device, statistics: str, way: str
) -> Plan:
    step = NetworkStep(workload, None, device)
    with torch.autocast(device.type, torch.bfloat16):
        return plan(step.net, step.x, mesh, statistics, recorded=way == GRAPH)


def longest(mesh: DeviceMesh, device: torch.device) -> Row:
    """The T at which one GPU has not enough memory, on all of them."""
    T = NETWORK.T
    while True:
        T *= 2
        workload = replace(NETWORK, T=T)
        alone = fits(workload, None, device)
        together = fits(workload, mesh, device)
        if not (alone and together) or T >= 1 << 14:
            break
    return {"what": "long", "T": T, "batch": NETWORK.batch, "time": mesh["time"].size(),
            "fits_one": alone, "fits": together}  # fmt: skip


def fits(workload: Workload, mesh: DeviceMesh | None, device: torch.device) -> bool:
    """Whether a step can be made, on all ranks."""
    good = torch.ones(1, device=device)
    try:
        NetworkStep(workload, mesh, device, statistics="shard", chunks=4)()
    except torch.OutOfMemoryError:
        good.zero_()
    gc.collect()
    torch.cuda.empty_cache()
    dist.all_reduce(good, dist.ReduceOp.MIN)
    return bool(good.item())
