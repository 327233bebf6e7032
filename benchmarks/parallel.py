"""Training on several GPUs: data-parallel steps, and sequences sharded over GPUs.

    torchrun --nproc_per_node 2 -m benchmarks.parallel data --workload resnet34-imagenet
    torchrun --nproc_per_node 4 -m benchmarks.parallel time

data: training steps by DistributedDataParallel. In turns, the first process steps alone while the
others wait, and all step together. The gradients of the common step must equal the mean of the
gradients that the processes compute alone.

time: a layer of a million LIF neurons, float32, forward and backward, on 1, 2, 4 ... GPUs, verified
against one GPU before it is timed. And Spiking-ResNet18, fused: 128 x 128 pixels, T = 128, batch
16, bfloat16, channels-last, with exact and with per-shard statistics of its batch norms; every data
x time for the same work; and the largest T, doubled until one GPU runs out of memory. Ranks scan
speculatively from rest, or wait for their first state; a row has the faster way. The speed-up of
replays is also predicted, by the paper's Eq. 5 and by `spikefuse.distributed.plan`. If fewer ranks
share the time than there are GPUs, groups of ranks repeat the same work at the same time.

Steps run eagerly and as replays of a CUDA graph, which are verified against eager steps. On CPUs,
over Gloo, only eager steps are measured.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import spikefuse as sf
from benchmarks import layers, networks, plots, runner
from benchmarks.agreement import ROUNDING
from benchmarks.layers import ALLOWED, LOOP, OURS, Inputs
from benchmarks.networks import FUSED, WORKLOADS, Workload, WorkloadTask
from benchmarks.processes import averaging, failure, highest, run_processes, time_together, ways
from benchmarks.runner import (
    EAGER,
    GRAPH,
    Contender,
    Record,
    Timing,
    contender_of,
    difference,
    first_line,
    record_graph,
)
from benchmarks.steps import StepResult
from spikefuse.distributed import Plan, make_mesh, mean_over_steps, plan, shard_time, steps_of

SPIKING: dict[str, dict[str, Any]] = {FUSED: {"fused": True}, OURS: {}, LOOP: {"impl": "reference"}}
WORKLOAD, DTYPE = "resnet18-mnist", "bfloat16"
NETWORK = Workload("resnet18", (2, 128, 128), num_classes=11, T=128, batch=16)
VERIFIED = 1 << 29  # largest number of elements for which a layer is compared with one GPU
VARIATION = 2.0  # a replay may differ from an eager step by this multiple of two eager steps


def main(argv: list[str] | None = None) -> Path | None:
    """Measure; return the path of the result in the main process."""
    parser = runner.make_parser("parallel", __doc__)
    add = parser.add_argument
    add("what", choices=("data", "time"))
    add("--workload", choices=WORKLOADS, default=WORKLOAD, metavar="WORKLOAD",
        help=f"of data: {', '.join(WORKLOADS)} ({WORKLOAD})")  # fmt: skip
    add("--T", type=int, nargs="+", help="of the layer of time (64 256 1024 4096)")
    args = runner.parse(parser, argv)
    if args.what == "time":
        args.usual_name = "time_sharding"
        args.T = args.T or ([8] if args.quick else [64, 256, 1024, 4096])
        return run_processes(parser, args, time_rows, plots.time_sharding)
    args.usual_name = "ddp" if args.workload == WORKLOAD else f"ddp_{args.workload}"
    args.dtype, second = DTYPE, LOOP if args.workload.endswith("-imagenet") else OURS
    args.networks = [FUSED, second]
    return run_processes(parser, args, data_rows)


# Data-parallel steps


def data_rows(args: argparse.Namespace, device: torch.device) -> Iterator[Record]:
    workload = WORKLOADS["conv-mnist"].small() if args.quick else WORKLOADS[args.workload]
    task = WorkloadTask(workload, args.dtype, device, seed=dist.get_rank())
    for name in args.networks:
        for way in ways(device):
            row = {"network": name, "way": way, "processes": dist.get_world_size()}
            yield row | measure_data(task, SPIKING[name], way, args)
            gc.collect()  # a graph must not outlive its connections


def measure_data(
    task: WorkloadTask, options: dict[str, Any], way: str, args: argparse.Namespace
) -> Record:
    """Verify a step, then time it in turns. If one process fails, all report it."""
    device, count = task.device, dist.get_world_size()
    ids = [device] if device.type == "cuda" else None
    wraps: dict[str, Any] = {"alone": lambda net: net}
    wraps["together"] = partial(averaging, device=device, device_ids=ids)
    steps: dict[str, Contender] = {}
    for name, wrap in wraps.items():
        network = networks.spiking(task, **options, wrap=wrap)
        steps[name] = contender_of(name, way, network.step(task, "training"), (), device)
        task.restore(network.net)  # recording has taken steps
    reason = steps["alone"].unavailable or steps["together"].unavailable
    if row := failure("unavailable", reason, device):
        return row
    alone, together = (step.run for step in steps.values())
    try:
        verify_data(task, alone, together)
    except AssertionError as error:
        reason = str(error)
    if row := failure("wrong", reason, device):
        return row
    row = {"status": "ok"}
    for name, step in steps.items():
        memory = Timing.of(args).clock.memory(step)
        row |= {f"{name}_bytes": value for value in memory.values()}
    first = alone if dist.get_rank() == 0 else lambda: None  # the others wait
    times = time_together({"alone": first, "together": together}, device, args.rounds)
    row |= {f"{name}_ms": ms for name, ms in times.items()}
    one, several = (ms["median"] for ms in times.values())
    row["images_per_second"] = round(count * task.workload.batch / several * 1e3, 1)
    row["throughput"] = round(count * one / several, 4)
    return row


def verify_data(
    task: WorkloadTask, alone: Callable[[], StepResult], together: Callable[[], StepResult]
) -> None:
    """Compare the step of all processes with the steps of each process alone.

    Raises:
        AssertionError: the loss or the gradients differ.
    """
    expected = alone()
    means = [g.clone() for g in expected.grads]
    for mean in means:
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    found, allowed = together(), ROUNDING[task.dtype]
    for what, error in (
        ("the loss", difference([found.loss], [expected.loss])),
        ("gradients", difference(found.grads, means)),
    ):
        assert error <= allowed, f"{what} differ by {error:.3g}, allowed is {allowed:g}"


# Sequences over several GPUs


@dataclass(frozen=True)
class Setup:
    """What all measurements share; `meshes` by the number of ranks that share the time."""

    args: argparse.Namespace
    device: torch.device
    meshes: dict[int, DeviceMesh]

    @property
    def ranks(self) -> int:
        return max(self.meshes)


def time_rows(args: argparse.Namespace, device: torch.device) -> Iterator[Record]:
    # Making a mesh is collective, so every process makes all of them.
    count = dist.get_world_size()
    sizes = [k for k in range(1, count + 1) if count % k == 0]
    setup = Setup(args, device, {k: make_mesh(time=k, device=device.type) for k in sizes})
    nets = {k: sf.Temporal(layers.lif()) for k in sizes}
    for k, net in nets.items():
        if k > 1:
            shard_time(net, setup.meshes[k]["time"])
    for way in ways(device):
        for T in args.T:
            yield from layer_rows(setup, nets, T, way)
        yield from network_rows(setup, way)
    if not args.quick:
        yield longest(setup)


def measure_step(setup: Setup, make: Callable[[], AnyStep], sharded: bool, way: str) -> Record:
    """Verify and time a step with both ways to pass states; return the faster.

    The peak memory is measured for the last way, on the rank that needs the most.
    """
    row: Record = {"status": "ok"}
    found: dict[bool, Record] = {}
    device, on_gpu = setup.device, setup.device.type == "cuda"
    gc.collect()
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    try:
        step = make()
        for speculates in (True, False) if sharded else (True,):
            if step.net.passing is not None:  # in place, without opening new connections
                step.net.passing.speculates = speculates
            run: Callable[[], list[Tensor]] = step
            if way == GRAPH:
                used = torch.cuda.memory_allocated(device) - before
                run, held = record_graph(step)
                row["bytes"] = int(highest(used + held, device))
            elif on_gpu:
                torch.cuda.reset_peak_memory_stats(device)
                step()
                used = torch.cuda.max_memory_allocated(device) - before
                row["bytes"] = int(highest(used, device))
            step.verify(run)
            found[speculates] = time_together({way: run}, device, setup.args.rounds)[way]
            del run
            gc.collect()  # frees a graph's memory before the next recording
    except torch.OutOfMemoryError as error:
        return {"status": "out of memory", "reason": first_line(error)}
    except AssertionError as error:
        return {"status": "wrong", "reason": first_line(error)}
    except Exception as error:
        if way == EAGER:
            raise
        return {"status": "unavailable", "reason": first_line(error)}
    speculate = min(found, key=lambda how: found[how]["median"])
    return row | {"chunks": 1, "speculate": speculate, "ms": found[speculate]}


def add_predictions(rows: Sequence[Record], made: Plan) -> None:
    """Add the speed-up by Eq. 5 and by the plan."""
    for row in rows:
        if row["status"] == "ok":
            seconds = made.seconds(row["time"], row["chunks"], row["data"], row["speculate"])
            row |= {"predicted": made.whole / seconds}
            row |= {"by_paper": made.speedup_by_paper(row["time"])}


def layer_rows(setup: Setup, nets: dict[int, sf.Temporal], T: int, way: str) -> list[Record]:
    """Return a row for each number of GPUs, with its best way to pass states."""
    N, rows = 1000 if setup.args.quick else 1_000_000, []
    batch = max(1, round(N**0.5))
    shape = (T, batch, N // batch)
    for k, mesh in setup.meshes.items():
        if k <= T:
            make = partial(LayerStep, nets[k], shape, mesh["time"], setup.device)
            row = {"what": "layer", "way": way, "T": T, "N": N, "time": k, "data": 1}
            rows.append(row | measure_step(setup, make, k > 1, way))
            if rows[0]["status"] == rows[-1]["status"] == "ok":
                rows[-1]["speedup"] = rows[0]["ms"]["median"] / rows[-1]["ms"]["median"]
    if way == GRAPH and setup.ranks <= T and all(row["status"] == "ok" for row in rows):
        x = torch.rand(shape, device=setup.device, requires_grad=True)
        add_predictions(rows, plan(sf.Temporal(layers.lif()), x, setup.meshes[setup.ranks]))
    gc.collect()
    return rows


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

    def verify(self, run: Callable[[], list[Tensor]]) -> None:
        """Compare with one GPU that has all time steps, unless the layer is too large.

        Raises:
            AssertionError: the results differ, on all ranks.
        """
        if math.prod(self.shape) > VERIFIED:
            return
        everything = slice(0, self.shape[0])
        whole = Inputs((self.drawn(0, everything).requires_grad_(),), (self.drawn(1, everything),))
        expected = layers.train(layers.lif(), whole)
        for tensor in run():
            tensor.fill_(torch.nan)  # a replay has to overwrite it
        y, grad = run()
        same = torch.equal(y, expected.outputs[0][self.mine])
        error = difference([grad], [expected.grads[0][self.mine]])
        assert not highest(not same, self.device), "spikes differ from one GPU's"
        # NaN counts as a difference.
        assert not highest(not error <= ALLOWED, self.device), "gradients differ from one GPU's"


class NetworkStep:
    """A training step of the fused network without optimizer; returns the gradients.

    Without a mesh, one GPU runs the whole step.
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

    def verify(self, run: Callable[[], list[Tensor]]) -> None:
        """Compare the gradients of a replay and of an eager step.

        Raises:
            AssertionError: the difference is too large, on all ranks.
        """
        if run is self:
            return
        expected = [g.clone() for g in self()]
        repeated = highest(difference(self(), expected), self.device)
        for grad in run():
            grad.fill_(torch.nan)  # the replay has to overwrite it
        error = difference(run(), expected)
        # NaN counts as a difference, and all ranks have to agree on the outcome.
        error = highest(error if error == error else 1e9, self.device)
        allowed = max(ROUNDING[DTYPE], VARIATION * repeated)
        assert error <= allowed, (
            f"a replay differs by {error:.3g} from an eager step, allowed is {allowed:.3g}"
        )


AnyStep = LayerStep | NetworkStep


def network_rows(setup: Setup, way: str) -> list[Record]:
    """Return rows of one GPU, of all GPUs by every data x time, and of k GPUs by time alone."""
    workload, whole = NETWORK, setup.ranks
    if setup.args.quick:
        workload = replace(NETWORK.small(), model="conv", T=max(2, whole), batch=max(2, whole))

    def row(mesh: DeviceMesh | None, statistics: str, time: int, data: int) -> Record:
        # If ranks share only time, each group of the mesh repeats all the work.
        copies = 1 if mesh is None else whole // (time * data)
        given = replace(workload, batch=workload.batch * copies)
        make = partial(NetworkStep, given, mesh, setup.device, statistics=statistics)
        about = {"what": "network", "way": way, "T": workload.T, "statistics": statistics}
        about |= {"time": time, "data": data}
        return about | measure_step(setup, make, time > 1, way)

    one = row(None, "exact", 1, 1)
    rows = [one | {"speedup": 1.0, "memory_of_one": 1.0}]
    for statistics in ("exact", "shard"):
        sharded = []
        for k, mesh in setup.meshes.items():
            if k > 1 or statistics == "exact":
                sharded.append(row(mesh, statistics, k, whole // k))
            if 1 < k < whole:
                sharded.append(row(mesh, statistics, k, 1))
        for found in sharded:
            if found["status"] == one["status"] == "ok":
                found["speedup"] = one["ms"]["median"] / found["ms"]["median"]
                if "bytes" in one:
                    found["memory_of_one"] = found["bytes"] / one["bytes"]
        if way == GRAPH:
            step = NetworkStep(workload, None, setup.device)
            with torch.autocast(setup.device.type, torch.bfloat16):
                made = plan(step.net, step.x, setup.meshes[whole], statistics)
            add_predictions([found for found in sharded if found["time"] > 1], made)
        rows += sharded
    return rows


def longest(setup: Setup) -> Record:
    """Double T until one GPU, or all of them, run out of memory."""
    T, alone, together = NETWORK.T, True, True
    while alone and together and T < 1 << 14:
        T *= 2
        workload = replace(NETWORK, T=T)
        alone = fits(workload, None, setup.device)
        together = fits(workload, setup.meshes[setup.ranks], setup.device)
    return {"what": "long", "T": T, "time": setup.ranks, "fits_one": alone, "fits": together}


def fits(workload: Workload, mesh: DeviceMesh | None, device: torch.device) -> bool:
    """Return whether a step fits into memory on all ranks."""
    failed = 0.0
    try:
        NetworkStep(workload, mesh, device, statistics="shard", chunks=4)()
    except torch.OutOfMemoryError:
        failed = 1.0
    gc.collect()
    torch.cuda.empty_cache()
    return not highest(failed, device)


if __name__ == "__main__":
    main()
