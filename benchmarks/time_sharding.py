"""Sequences sharded over GPUs: one layer of LIF neurons, and training steps of Spiking-ResNet18.

    torchrun --nproc_per_node 4 -m benchmarks.time_sharding
    torchrun --nproc_per_node 4 -m benchmarks.time_sharding --rounds 5       in fewer minutes

The layer: a million neurons, float32, forward and backward, T from 32 to 4096 on 1, 2, 4 ... GPUs
and in several numbers of microbatches, verified against one GPU before it is timed. The network,
fused: 128 x 128 pixels, T = 128, batch 16, bfloat16, channels-last, with exact and with per-shard
statistics of its batch norms; every data x time for the same work; and the largest T, doubled until
one GPU runs out of memory. Both run eagerly and as replays of a CUDA graph, and each way is
compared with one GPU in the same way; replays are verified against eager steps. The speed-up of
replays is also predicted, by the paper's Eq. 5 and by `spikefuse.distributed.plan`.

If fewer ranks share the time than there are GPUs, the others do the same at the same time. The
result is written after each part. On CPUs, over Gloo, only eager steps are measured.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import spikefuse as sf
from benchmarks import layers, plots, record, runner
from benchmarks.agreement import ROUNDING, difference
from benchmarks.network_steps import WAYS, Workload, record_graph
from benchmarks.ranks import averaging, highest, peak_bytes, rank_device, time_together
from benchmarks.runner import EAGER, GRAPH, first_line
from spikefuse.distributed import Plan, make_mesh, mean_over_steps, plan, shard_time, steps_of
from spikefuse.train.processes import Processes

CHUNKS, NETWORK_CHUNKS = (1, 2, 4, 8, 16), (1, 2, 4)
NETWORK = Workload("resnet18", (2, 128, 128), num_classes=11, T=128, batch=16)
PARTS = ("layer", "network", "long")
VERIFIED = 1 << 29  # largest number of elements for which a layer is compared with one GPU
SPREAD = 2.0  # a replay may differ from an eager step by this multiple of two eager steps

Record = dict[str, Any]
# How states are passed: number of microbatches, and whether ranks scan speculatively from rest.
Passing = tuple[int, bool]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = runner.make_parser("time_sharding", __doc__)
    parser.add_argument("--T", type=int, nargs="+", help="of the layer (32 64 ... 4096)")
    parser.add_argument("--N", type=int, help="neurons of the layer (1,000,000)")
    parser.add_argument("--chunks", type=int, nargs="+", default=CHUNKS,
                        help="microbatches of the layer (1 2 4 8 16)")  # fmt: skip
    parser.add_argument("--network-chunks", type=int, nargs="+", default=NETWORK_CHUNKS,
                        help="microbatches of the network (1 2 4)")  # fmt: skip
    parser.add_argument("--only", choices=PARTS, nargs="+", help="parts (all)")
    args = runner.parse(parser, argv)
    args.T = args.T or ([8] if args.quick else [32 << i for i in range(8)])
    args.N = args.N or (1000 if args.quick else 1_000_000)
    args.only = args.only or (PARTS[:2] if args.quick else PARTS)
    if Processes.started().count < 2:
        parser.error("start it with torchrun --nproc_per_node N -m benchmarks.time_sharding")
    return args


@dataclass(frozen=True)
class Job:
    """What all measurements of a run share; `meshes` by the number of ranks that share the time."""

    args: argparse.Namespace
    device: torch.device
    meshes: dict[int, DeviceMesh]

    @property
    def ranks(self) -> int:
        return max(self.meshes)

    @property
    def ways(self) -> Sequence[str]:
        return WAYS if self.device.type == "cuda" else (EAGER,)


def main(argv: list[str] | None = None) -> Path | None:
    """Measure; return the path of the result in the main process."""
    args, processes = arguments(argv), Processes.started()
    device = rank_device(args.device, processes)
    settings = runner.settings_of(args) | {"processes": processes.count}
    result = record.document("time_sharding", device, args.quick, settings) | {"rows": []}
    into, path = record.folder(args.out, args.quick), None
    with processes.connected(device):
        # Making a mesh is collective, so every process makes all of them.
        counts = [k for k in range(1, processes.count + 1) if processes.count % k == 0]
        meshes = {k: make_mesh(time=k, device=device.type) for k in counts}
        for row in measure_parts(Job(args, device, meshes)):
            result["rows"].append(row)
            if processes.main:
                print(describe(row), flush=True)
                path = record.write(into, result)
    if path is not None:
        plots.time_sharding(record.read(path), path.with_suffix(".png"))
        print(f"wrote {path}")
    return path


def measure_parts(job: Job) -> Iterator[Record]:
    nets = {k: sf.Temporal(layers.lif()) for k in job.meshes}
    for k, net in nets.items():
        if k > 1:
            shard_time(net, job.meshes[k]["time"])
    for way in job.ways:  # first everything eagerly, in case a recording fails
        for T in job.args.T if "layer" in job.args.only else ():
            yield from layer_rows(job, nets, T, way)
        if "network" in job.args.only:
            yield from network_rows(job, way)
    if "long" in job.args.only:
        yield longest(job)


def passings(counts: Sequence[int]) -> list[Passing]:
    """Return the ways to pass states that are tried: speculative, and waiting in microbatches."""
    return [(1, True), *((chunks, False) for chunks in counts)]


def add_predictions(rows: Sequence[Record], made: Plan) -> None:
    """Add the speed-up by Eq. 5 and by the plan."""
    for row in rows:
        if row["status"] == "ok":
            seconds = made.seconds(row["time"], row["chunks"], row["data"], row["speculate"])
            row |= {"predicted": made.whole / seconds}
            row |= {"by_paper": made.speedup_by_paper(row["time"])}


# One layer


def set_passing(net: sf.Temporal, how: Passing) -> None:
    """Change the way to pass states without opening new connections."""
    if net.passing is not None:
        net.passing.chunks, net.passing.speculates = how


def layer_rows(job: Job, nets: dict[int, sf.Temporal], T: int, way: str) -> list[Record]:
    """Return a row for each number of GPUs, with its best way to pass states."""
    batch = max(1, round(job.args.N**0.5))
    shape = (T, batch, job.args.N // batch)
    one, rows = 0.0, []
    for k, mesh in job.meshes.items():
        if k > T:
            continue
        row = {"what": "layer", "way": way, "T": T, "N": job.args.N, "time": k, "data": 1}
        rows.append(row)
        tried = [(1, True)] if k == 1 else passings(job.args.chunks)
        try:
            step = LayerStep(nets[k], shape, mesh["time"], job.device)
            found = {how: time_layer(job, step, how, way) for how in tried}
        except Exception as error:
            if way == EAGER:
                raise
            row |= {"status": "unavailable", "reason": first_line(error)}
            continue
        row |= best_passing(found)
        one = row["ms"]["median"] if k == 1 else one
        row |= {"speedup": one / row["ms"]["median"]} if one else {}
    if way == GRAPH and job.ranks <= T and all(row["status"] == "ok" for row in rows):
        x = torch.rand(shape, device=job.device, requires_grad=True)
        net = sf.Temporal(layers.lif())
        add_predictions(rows, plan(net, x, job.meshes[job.ranks]))
    gc.collect()
    return rows


def best_passing(found: dict[Passing, Record]) -> Record:
    """Return the fastest way to pass states, and the times of all."""
    chunks, speculate = min(found, key=lambda how: found[how]["median"])
    times = {
        f"{chunks}" if speculate else f"{chunks}, waiting": ms["median"]
        for (chunks, speculate), ms in found.items()
    }
    row = {"status": "ok", "chunks": chunks, "speculate": speculate, "by_chunks": times}
    return row | {"ms": found[chunks, speculate]}


def time_layer(job: Job, step: LayerStep, how: Passing, way: str) -> Record:
    """Time a layer's step; verify it unless it is too large.

    Raises:
        AssertionError: the step is wrong.
    """
    set_passing(step.net, how)
    run: Callable[[], Sequence[Tensor]] = step
    if way == GRAPH:
        run, _ = record_graph(step)
    if math.prod(step.shape) <= VERIFIED:
        step.verify(run)
    found = time_together(run, job.device, job.args.rounds)
    del run
    gc.collect()  # frees a graph's memory
    return found


class LayerStep:
    """Forward and backward of a rank's time steps, for given gradients."""

    def __init__(
        self, net: sf.Temporal, shape: tuple[int, ...], axis: DeviceMesh, device: torch.device
    ) -> None:
        self.net, self.shape, self.device = net, shape, device
        self.mine = steps_of(shape[0], axis.get_local_rank(), axis.size())
        self.x = self.drawn(0, self.mine).requires_grad_()
        self.grad = self.drawn(1, self.mine)

    def drawn(self, what: int, steps: slice) -> Tensor:
        """Draw uniform values with a seed per time step, so that no rank has to draw all steps."""
        made = []
        for t in range(self.shape[0])[steps]:
            seed = (self.shape[0] * 2 + what) << 20 | t
            generator = torch.Generator(self.device).manual_seed(seed)
            made.append(torch.rand(self.shape[1:], generator=generator, device=self.device))
        return torch.stack(made)

    def __call__(self) -> list[Tensor]:
        """Return the spikes and the gradient of x."""
        self.x.grad = None
        y = self.net(self.x)
        y.backward(self.grad)
        return [y.detach(), self.x.grad]

    def verify(self, run: Callable[[], Sequence[Tensor]]) -> None:
        """Compare with one GPU that has all time steps.

        Raises:
            AssertionError: the results differ.
        """
        everything = slice(0, self.shape[0])
        x = self.drawn(0, everything).requires_grad_()
        expected = layers.lif()(x)
        expected.backward(self.drawn(1, everything))
        for tensor in run():
            tensor.fill_(torch.nan)  # a replay has to overwrite it
        y, grad = run()
        assert torch.equal(y, expected[self.mine]), "spikes differ from one GPU's"
        torch.testing.assert_close(grad, x.grad[self.mine], rtol=1e-5, atol=1e-6)


# The network


class NetworkStep:
    """A training step of the fused network without optimizer; returns the gradients.

    Without a mesh it is that of one GPU.
    """

    def __init__(
        self, workload: Workload, mesh: DeviceMesh | None, device: torch.device, **options: Any
    ) -> None:
        torch.manual_seed(0)
        net = sf.Temporal(workload.network(workload.neuron))
        net.to(device, memory_format=torch.channels_last)
        self.net = sf.fuse(net)
        self.mesh, self.device = mesh, device
        self.model: nn.Module = self.net
        steps, rows = slice(0, workload.T), slice(0, workload.batch)
        if mesh is not None:
            time_axis, data = mesh["time"], mesh["data"]
            steps = steps_of(workload.T, time_axis.get_local_rank(), time_axis.size())
            rows = steps_of(workload.batch, data.get_local_rank(), data.size())
            if time_axis.size() > 1:
                shard_time(self.net, time_axis, **options)
            # Running statistics need no broadcast: they agree, or are meant to differ.
            self.model = averaging(
                self.net, device, broadcast_buffers=False, gradient_as_bucket_view=True
            )
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


def workload_of(job: Job) -> Workload:
    if not job.args.quick:
        return NETWORK
    small = replace(NETWORK.small(), model="conv")
    return replace(small, T=max(small.T, job.ranks), batch=max(small.batch, job.ranks))


def network_rows(job: Job, way: str) -> list[Record]:
    """Return rows of one GPU, of all GPUs by every data x time, and of k GPUs by time alone."""
    workload, whole = workload_of(job), job.ranks
    one = network_row(job, workload, None, "exact", way)
    rows = [{**one, "time": 1, "data": 1, "speedup": 1.0, "memory_of_one": 1.0}]
    for statistics in ("exact", "shard"):
        shared = []
        for k, mesh in job.meshes.items():
            if k > 1 or statistics == "exact":
                row = network_row(job, workload, mesh, statistics, way)
                shared.append({**row, "time": k, "data": whole // k})
            if 1 < k < whole:  # by time alone: each group of the mesh does all the work
                copies = replace(workload, batch=workload.batch * whole // k)
                row = network_row(job, copies, mesh, statistics, way)
                shared.append({**row, "time": k, "data": 1, "batch": workload.batch})
        for row in shared:
            if row["status"] == "ok" and one["status"] == "ok":
                row["speedup"] = one["ms"]["median"] / row["ms"]["median"]
                row["memory_of_one"] = row["bytes"] / one["bytes"] if one["bytes"] else None
        if way == GRAPH:
            step = NetworkStep(workload, None, job.device)
            with torch.autocast(job.device.type, torch.bfloat16):
                made = plan(step.net, step.x, job.meshes[whole], statistics)
            add_predictions([row for row in shared if row["time"] > 1], made)
        rows += shared
    return rows


def network_row(
    job: Job, workload: Workload, mesh: DeviceMesh | None, statistics: str, way: str
) -> Record:
    row = {"what": "network", "way": way, "T": workload.T, "batch": workload.batch}
    row |= {"statistics": statistics}
    sharded = mesh is not None and mesh["time"].size() > 1
    found: dict[Passing, Record] = {}
    gc.collect()
    before = torch.cuda.memory_allocated(job.device) if job.device.type == "cuda" else 0
    try:
        step = NetworkStep(workload, mesh, job.device, statistics=statistics)
        for how in passings(job.args.network_chunks) if sharded else [(1, True)]:
            set_passing(step.net, how)
            if way == EAGER:
                run, used = step, peak_bytes(step, job.device, before)
            else:
                used = torch.cuda.memory_allocated(job.device) - before
                run, held = record_graph(step)
                used = int(highest(used + held, job.device))
                row["error"] = max(verify_replay(step, run), row.get("error", 0.0))
            found[how] = time_together(run, job.device, job.args.rounds)
            row["bytes"] = used
            del run
            gc.collect()  # frees a graph's memory before the next recording
    except torch.OutOfMemoryError as error:
        return row | {"status": "out of memory", "reason": first_line(error)}
    except AssertionError as error:
        return row | {"status": "wrong", "reason": first_line(error)}
    except Exception as error:
        if way == EAGER:
            raise
        return row | {"status": "unavailable", "reason": first_line(error)}
    return row | best_passing(found)


def verify_replay(step: Any, run: Callable[[], list[Tensor]]) -> float:
    """Return the difference of a replay's gradients from those of an eager step.

    Raises:
        AssertionError: it is too large, on all ranks.
    """
    expected = [g.clone() for g in step()]
    spread = difference(step(), expected)
    for grad in run():
        grad.fill_(torch.nan)  # the replay has to overwrite it
    error = difference(run(), expected)
    # NaN counts as a difference, and all ranks have to agree on the outcome.
    error = highest(error if error == error else 1e9, step.device)
    allowed = max(ROUNDING["bfloat16"], SPREAD * highest(spread, step.device))
    assert error <= allowed, f"a replay is {error:.3g} from an eager step, allowed is {allowed:.3g}"
    return float(f"{error:.3g}")


def longest(job: Job) -> Record:
    """Double T until one GPU, or all of them, run out of memory."""
    mesh, T = job.meshes[job.ranks], NETWORK.T
    while True:
        T *= 2
        workload = replace(NETWORK, T=T)
        alone, together = fits(job, workload, None), fits(job, workload, mesh)
        if not (alone and together) or T >= 1 << 14:
            break
    return {"what": "long", "T": T, "batch": NETWORK.batch, "time": job.ranks,
            "fits_one": alone, "fits": together}  # fmt: skip


def fits(job: Job, workload: Workload, mesh: DeviceMesh | None) -> bool:
    """Return whether a step fits into memory on all ranks."""
    good = torch.ones(1, device=job.device)
    try:
        NetworkStep(workload, mesh, job.device, statistics="shard", chunks=4)()
    except torch.OutOfMemoryError:
        good.zero_()
    gc.collect()
    torch.cuda.empty_cache()
    dist.all_reduce(good, dist.ReduceOp.MIN)
    return bool(good.item())


def describe(row: Record) -> str:
    about = ("what", "way", "T", "time", "data", "statistics", "chunks")
    text = ", ".join(f"{k} {row[k]}" for k in about if k in row)
    if "ms" in row:
        text += f": {row['ms']['median']:.3f} ms, {row.get('speedup', 0):.2f} times as fast as one"
    return text + "".join(f", {k} {row[k]}" for k in ("fits_one", "fits", "reason") if k in row)


if __name__ == "__main__":
    main()
