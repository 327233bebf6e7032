"""Time shared by several GPUs: one layer of LIF neurons, and training steps of Spiking-ResNet18.

    torchrun --nproc_per_node 4 -m benchmarks.time_sharding

The layer: a million neurons, float32, forward and backward, T from 32 to 4096 on 1, 2, 4 ... GPUs
and in several numbers of chunks. The network: 128 x 128 pixels, T = 128, batch 16, bfloat16,
channels-last, with exact and with per-shard statistics of its batch norms; data x time for the same
work; and the largest T, doubled until one GPU has not enough memory. Each is predicted by the
paper's Eq. 5 and by `spikefuse.distributed.plan`, and verified against one GPU before it is timed.
A step ends when all GPUs have ended it. Where fewer ranks share the time than there are GPUs, the
others do the same at the same time. On CPUs over Gloo.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import spikefuse as sf
from benchmarks import lif, plots, record
from benchmarks.runner import first_line, spread
from benchmarks.workloads import Workload
from spikefuse.distributed import (
    Plan,
    make_mesh,
    mean_over_steps,
    plan,
    reduce_gradients,
    shard_time,
    steps_of,
)
from spikefuse.distributed.time_sharding import TimeShard
from spikefuse.train.processes import Processes

NETWORK = Workload("resnet18", (2, 128, 128), num_classes=11, T=128, batch=16)
CHUNKS = (1, 2, 4, 8, 16)
# Time steps, and the speed-up on so many GPUs.
LAYER_BARS = {(1024, 2): 1.75, (1024, 4): 2.6, (4096, 2): 1.9, (4096, 4): 3.4}
NETWORK_BARS = {("shard", 2): 1.8, ("shard", 4): 3.2, ("exact", 2): 1.6, ("exact", 4): 2.4}
MEMORY_BAR, PREDICTION_BAR = (4, 0.30), 0.15
# Steps in a round.
REPETITIONS = 3
# Elements up to which a layer is verified against one GPU.
VERIFIED = 1 << 29


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.time_sharding", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--T", type=int, nargs="+", help="of the layer (32 64 ... 4096)")
    parser.add_argument("--N", type=int, help="neurons of the layer (1,000,000)")
    parser.add_argument("--chunks", type=int, nargs="+", default=CHUNKS, help="(1 2 4 8 16)")
    parser.add_argument("--rounds", type=int, help="(11)")
    parser.add_argument("--only", choices=("layer", "network", "long"), nargs="+", help="parts")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, help="folder for the result (benchmarks/results)")
    parser.add_argument("--quick", action="store_true", help="a trial: small, few rounds")
    args = parser.parse_args(argv)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.T = args.T or ([8] if args.quick else [32 << i for i in range(8)])
    args.N = args.N or (1000 if args.quick else 1_000_000)
    args.rounds = args.rounds or (2 if args.quick else 11)
    args.only = args.only or (["layer", "network"] if args.quick else ["layer", "network", "long"])
    if min(*args.T, args.N, *args.chunks, args.rounds) < 1:
        parser.error("--T, --N, --chunks and --rounds must be at least 1")
    if Processes.started().count < 2:
        parser.error("start it with torchrun --nproc_per_node N -m benchmarks.time_sharding")
    return args


def main(argv: list[str] | None = None) -> Path | None:
    """The path of the result, in the process that writes it."""
    args, processes = arguments(argv), Processes.started()
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", processes.local_rank)
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    rows: list[dict[str, Any]] = []
    with processes.connected(device):
        # Every process makes all meshes: to make one is a thing that they do together.
        meshes = {k: make_mesh(time=k, device=device.type) for k in _divisors(processes.count)}
        if "layer" in args.only:
            nets = layers(meshes)
            for T in args.T:
                rows += layer_rows(T, meshes, nets, device, args)
                report(rows, processes)
        if "network" in args.only:
            rows += network_rows(meshes, device, args)
            report(rows, processes)
        if "long" in args.only:
            rows.append(longest(meshes[processes.count], device, args))
            report(rows, processes)
    if not processes.main:
        return None
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "quick", "device")}
    result = record.document("time_sharding", device, args.quick,
                             {**settings, "processes": processes.count})  # fmt: skip
    judged = device.type == "cuda" and not args.quick
    result |= {"rows": rows, "bars": bars(rows) if judged else []}
    record.print_bars(result["bars"])
    path = record.write(record.folder(args.out, args.quick), result)
    drawn = plots.time_sharding(result, path.with_suffix(".png"))
    print(f"wrote {path}, {drawn or 'no plot'}")
    return path


def report(rows: list[dict[str, Any]], processes: Processes) -> None:
    if processes.main:
        print(progress(rows[-1]), flush=True)


def _divisors(count: int) -> list[int]:
    return [k for k in range(1, count + 1) if count % k == 0]


# One layer


def layers(meshes: dict[int, DeviceMesh]) -> dict[int, sf.Temporal]:
    """One for each number of GPUs; connections take time and memory."""
    return {
        k: sf.Temporal(lif.neuron()) if k == 1 else shard_time(sf.Temporal(lif.neuron()), m["time"])
        for k, m in meshes.items()
    }


def layer_rows(
    T: int,
    meshes: dict[int, DeviceMesh],
    nets: dict[int, sf.Temporal],
    device: torch.device,
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """A row for each number of GPUs, with its best number of chunks."""
    batch = max(1, round(args.N**0.5))
    shape = (T, batch, args.N // batch)
    one, rows = 0.0, []
    for k, mesh in meshes.items():
        if k > T:
            continue
        about = {"what": "layer", "T": T, "N": args.N, "time": k, "data": 1}
        step, found = LayerStep(nets[k], shape, mesh["time"], device), {}
        for chunks in args.chunks if k > 1 else (1,):
            set_chunks(nets[k], chunks)
            if shape[0] * args.N <= VERIFIED:
                step.verify(shape)
            found[chunks] = timed(step, device, args.rounds)
        del step
        best = min(found, key=lambda chunks: found[chunks]["median"])
        one = one or found[best]["median"]
        row = {**about, "chunks": best, "ms": found[best], "speedup": one / found[best]["median"]}
        row["by_chunks"] = {str(chunks): ms["median"] for chunks, ms in found.items()}
        rows.append(row)
    x = torch.rand(shape, device=device, requires_grad=True)
    if mesh.size() <= T:
        predict(rows, plan(sf.Temporal(lif.neuron()), x, mesh))
    return rows


class LayerStep:
    """Forward and backward of a rank's steps, for given gradients."""

    def __init__(
        self, net: nn.Module, shape: tuple[int, ...], axis: DeviceMesh, device: torch.device
    ) -> None:
        self.net, self.seed = net, shape[0]
        self.mine = steps_of(shape[0], axis.get_local_rank(), axis.size())
        self.x = self.drawn(shape, device, 0, self.mine).requires_grad_()
        self.grad = self.drawn(shape, device, 1, self.mine)

    def drawn(
        self, shape: tuple[int, ...], device: torch.device, what: int, steps: slice
    ) -> Tensor:
        """Uniform values, each step from a seed of its own: no rank draws all of them."""
        made = []
        for t in range(shape[0])[steps]:
            generator = torch.Generator(device).manual_seed((self.seed * 2 + what) << 20 | t)
            made.append(torch.rand(shape[1:], generator=generator, device=device))
        return torch.stack(made)

    def __call__(self) -> None:
        self.x.grad = None
        self.net(self.x).backward(self.grad)

    def verify(self, shape: tuple[int, ...]) -> None:
        """Spikes and gradients of this rank's steps are those of one GPU with all steps."""
        everything = slice(0, shape[0])
        x = self.drawn(shape, self.x.device, 0, everything).requires_grad_()
        y = lif.neuron()(x)
        y.backward(self.drawn(shape, self.x.device, 1, everything))
        self.x.grad = None
        mine = self.net(self.x)
        mine.backward(self.grad)
        assert torch.equal(mine, y[self.mine]), "spikes differ from one GPU's"
        assert x.grad is not None
        torch.testing.assert_close(self.x.grad, x.grad[self.mine], rtol=1e-5, atol=1e-6)


# A network


class NetworkStep:
    """A training step of the network, without its optimizer."""

    def __init__(
        self, workload: Workload, mesh: DeviceMesh | None, device: torch.device, **how: Any
    ) -> None:
        torch.manual_seed(0)
        self.net = sf.Temporal(workload.network(workload.neuron))
        self.net.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.mesh, self.device = mesh, device
        steps, rows = slice(0, workload.T), slice(0, workload.batch)
        if mesh is not None:
            time_axis, data = mesh["time"], mesh["data"]
            steps = steps_of(workload.T, time_axis.get_local_rank(), time_axis.size())
            rows = steps_of(workload.batch, data.get_local_rank(), data.size())
            if time_axis.size() > 1:
                shard_time(self.net, time_axis, **how)
        count, size = steps.stop - steps.start, rows.stop - rows.start
        pixels = torch.randint(0, 3, (count * size, *workload.shape), device=device).float()
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        self.x = pixels.unflatten(0, (count, size))
        self.labels = torch.zeros(size, dtype=torch.int64, device=device)

    def __call__(self) -> None:
        for p in self.net.parameters():
            p.grad = None
        with torch.autocast(self.device.type, torch.bfloat16):
            y = self.net(self.x)
        mean = y.mean(0) if self.mesh is None else mean_over_steps(y, self.mesh["time"])
        F.cross_entropy(mean.float(), self.labels).backward()
        if self.mesh is not None:
            reduce_gradients(self.net, self.mesh)


def network_rows(
    meshes: dict[int, DeviceMesh], device: torch.device, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """One GPU with all the work; all GPUs by every data x time; and k of them by time alone."""
    workload = replace(NETWORK.small(), model="conv") if args.quick else NETWORK
    rows, whole = [], max(meshes)
    one = measure_network(workload, None, device, args, "exact", (1,))
    rows.append({**one, "time": 1, "data": 1, "speedup": 1.0, "memory": 1.0})
    for statistics in ("exact", "shard"):
        for k, mesh in meshes.items():
            if k > 1 or statistics == "exact":
                row = measure_network(workload, mesh, device, args, statistics, args.chunks)
                rows.append({**row, "time": k, "data": whole // k})
            if 1 < k < whole:  # by time alone: each row of the mesh has all the work
                copies = replace(workload, batch=workload.batch * whole // k)
                row = measure_network(copies, mesh, device, args, statistics, args.chunks)
                rows.append({**row, "time": k, "data": 1, "batch": workload.batch})
    for row in rows[1:]:
        if row["status"] == "ok" and one["status"] == "ok":
            row["speedup"] = one["ms"]["median"] / row["ms"]["median"]
            row["memory"] = row["bytes"] / one["bytes"] if one["bytes"] else None
    step = NetworkStep(workload, None, device)
    with torch.autocast(device.type, torch.bfloat16):
        for statistics in ("exact", "shard"):
            predict([r for r in rows if r["statistics"] == statistics and r["time"] > 1],
                    plan(step.net, step.x, meshes[whole], statistics))  # fmt: skip
    return rows


def measure_network(
    workload: Workload,
    mesh: DeviceMesh | None,
    device: torch.device,
    args: argparse.Namespace,
    statistics: str,
    counts: tuple[int, ...],
) -> dict[str, Any]:
    about = {"what": "network", "T": workload.T, "batch": workload.batch, "statistics": statistics}
    size = 1 if mesh is None else mesh["time"].size()
    found: dict[int, dict[str, Any]] = {}
    used = 0
    try:
        step = NetworkStep(workload, mesh, device, statistics=statistics)
        for chunks in counts if size > 1 else (1,):
            set_chunks(step.net, chunks)
            found[chunks] = timed(step, device, args.rounds)
            used = peak(step, device)
        del step
        gc.collect()
    except torch.OutOfMemoryError as error:
        return {**about, "status": "out of memory", "reason": first_line(error)}
    best = min(found, key=lambda chunks: found[chunks]["median"])
    by_chunks = {str(chunks): ms["median"] for chunks, ms in found.items()}
    return {**about, "status": "ok", "chunks": best, "ms": found[best], "bytes": used,
            "by_chunks": by_chunks}  # fmt: skip


def longest(mesh: DeviceMesh, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
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


# What all have in common


def set_chunks(net: sf.Temporal, chunks: int) -> None:
    if isinstance(net.shard, TimeShard):
        net.shard.chunks = chunks


def timed(step: Callable[[], None], device: torch.device, rounds: int) -> dict[str, Any]:
    """Milliseconds of a step, that of the slowest rank in each round."""
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
            dist.all_reduce(together)  # a step ends for all
        synchronize()
        found.append((time.perf_counter() - start) / REPETITIONS * 1e3)
    values = torch.tensor(found, dtype=torch.float64, device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return spread(values.tolist())


def peak(step: Callable[[], None], device: torch.device) -> int:
    """Bytes of a GPU's memory in a step, on the rank that needs most."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    step()
    used = torch.tensor([torch.cuda.max_memory_allocated(device)], device=device)
    dist.all_reduce(used, dist.ReduceOp.MAX)
    return int(used)


def predict(rows: list[dict[str, Any]], made: Plan) -> None:
    """Add what Eq. 5 and the plan say of each row's speed-up."""
    for row in rows:
        if row.get("status", "ok") == "ok":
            seconds = made.seconds(row["time"], row["chunks"], row["data"])
            row["predicted"] = made.whole / seconds
            row["by_paper"] = made.speedup_by_paper(row["time"])
            row["exchange_ms"] = 1e3 * made.exchange


def progress(row: dict[str, Any]) -> str:
    said = ", ".join(f"{k} {row[k]}" for k in ("what", "T", "time", "data", "statistics", "chunks")
                     if k in row)  # fmt: skip
    if "ms" in row:
        said += f": {row['ms']['median']:.3f} ms, {row.get('speedup', 0):.2f} times as fast as one"
    return said + "".join(f", {k} {row[k]}" for k in ("fits_one", "fits", "reason") if k in row)


def bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The project's own bars; where nothing was measured, one is missed."""
    layers = {(r["T"], r["time"]): r for r in rows if r["what"] == "layer"}
    alone = [r for r in rows if r["what"] == "network" and r["data"] == 1]
    nets = {(r["statistics"], r["time"]): r for r in alone}
    most = max([r.get("time", 1) for r in rows], default=1)
    found = [
        record.bar(f"layer, T={T}, {k} GPUs: speed-up", layers.get((T, k), {}).get("speedup"), bar)
        for (T, k), bar in LAYER_BARS.items() if k <= most
    ]  # fmt: skip
    found += [
        record.bar(f"network, {statistics} statistics, {k} GPUs: speed-up",
                   nets.get((statistics, k), {}).get("speedup"), bar)
        for (statistics, k), bar in NETWORK_BARS.items() if k <= most
    ]  # fmt: skip
    k, limit = MEMORY_BAR
    if k <= most:
        memory = nets.get(("shard", k), {}).get("memory")
        found.append(record.bar(f"network, {k} GPUs: memory of one's", memory, limit, False))
    errors = [abs(r["predicted"] / r["speedup"] - 1) for r in rows
              if r.get("predicted") and r.get("speedup") and r["time"] > 1]  # fmt: skip
    worst = max(errors, default=None)
    found.append(record.bar("speed-up predicted: largest error", worst, PREDICTION_BAR, False))
    return found


if __name__ == "__main__":
    main()
