"""Training on several GPUs: data-parallel steps, and event layers with sharded neurons.

    torchrun --nproc_per_node 2 -m benchmarks.parallel data --workload resnet34-imagenet
    torchrun --nproc_per_node 1 -m benchmarks.parallel events     adds a row; also with 2, 4, ...

data: training steps by DistributedDataParallel, eagerly and as replays of a CUDA graph. In turns,
the first process steps alone while the others wait, and all step together. The gradients of the
common step must equal the mean of the gradients that the processes compute alone.

events: each rank adds as many neurons, in layers of constant width, and as many events, as in
Finkbeiner and Neftci's poster. Efficiency is the time of one rank over that of K ranks. A small
sharded network is compared with the whole one.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import spikefuse as sf
from benchmarks import networks, plots, record, runner
from benchmarks.agreement import ROUNDING, StepResult
from benchmarks.events import CLASSES, event_neuron
from benchmarks.layers import DTYPES, LOOP, OURS
from benchmarks.networks import FUSED, WORKLOADS, WorkloadTask
from benchmarks.runner import (
    EAGER,
    GRAPH,
    WAYS,
    Contender,
    Record,
    Timing,
    difference,
    first_line,
    measure,
    record_graph,
    spread,
    synchronize,
)
from spikefuse.distributed import NeuronShard, Replicated, connect, disconnect, shard_neurons
from spikefuse.distributed.neuron_sharding import bounds
from spikefuse.nn import EventLinear, Events, scale_to_rate
from spikefuse.train.processes import Processes

SPIKING: dict[str, dict[str, Any]] = {FUSED: {"fused": True}, OURS: {}, LOOP: {"impl": "reference"}}
WORKLOAD, DATA_REPETITIONS = "resnet18-mnist", 20

RATE, EVENT_ROUNDING = 0.01, 1e-5  # neurons that fire; allowed difference, of the largest value
EVENT_SIZES = {"width": 9_500, "T": 100, "batch": 48, "neurons": 47_500}
QUICK_SIZES = {"width": 100, "T": 10, "batch": 4, "neurons": 200}


def main(argv: list[str] | None = None) -> Path | None:
    parser = runner.make_parser("parallel", __doc__)
    add = parser.add_argument
    add("what", choices=("data", "events"))
    add("--workload", choices=WORKLOADS, default=WORKLOAD, metavar="WORKLOAD",
        help=f"of data: {', '.join(WORKLOADS)} ({WORKLOAD})")  # fmt: skip
    add("--dtype", choices=DTYPES, default="bfloat16", help="of data (bfloat16)")
    add("--networks", nargs="+", choices=SPIKING, metavar="NETWORK",
        help=f"of data: {'; '.join(SPIKING)}")  # fmt: skip
    add("--neurons", type=int, help="of each rank of events (47,500)")
    args = runner.parse(parser, argv)
    if args.what == "events":
        sizes = QUICK_SIZES if args.quick else EVENT_SIZES
        neurons = max(args.neurons or sizes["neurons"], sizes["width"])
        vars(args).update({**sizes, "rate": RATE, "neurons": neurons, "name": "event_scaling"})
        rows = partial(event_rows, earlier_rows(args) if Processes.started().main else [])
        return run_processes(parser, args, rows, plots.weak_scaling, least=1)
    usual = (FUSED, LOOP) if args.workload.endswith("-imagenet") else (FUSED, OURS)
    args.networks = args.networks or list(usual)
    args.name = "ddp" if args.workload == WORKLOAD else f"ddp_{args.workload}"
    return run_processes(parser, args, data_rows)


# Shared with time_sharding


def run_processes(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    rows: Callable[[argparse.Namespace, torch.device], Iterator[Record]],
    plot: Callable[[Record, Path], Any] | None = None,
    least: int = 2,
) -> Path | None:
    """Measure rows in all processes that torchrun started; the main process writes them."""
    processes, path = Processes.started(), None
    if "TORCHELASTIC_RUN_ID" not in os.environ or processes.count < least:
        parser.error(f"start it with torchrun --nproc_per_node N, N at least {least}")
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", processes.local_rank)
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True  # as in the trainer
        # NCCL's error handling would query events while a graph is recorded.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    settings = runner.settings_of(args) | {"processes": processes.count}
    connect("nccl" if device.type == "cuda" else "gloo")
    if processes.main:
        path = runner.write_rows(args, rows(args, device), settings, plot=plot)
    else:
        deque(rows(args, device), maxlen=0)
    disconnect()  # skipped after an exception: it needs all processes
    return path


def highest(value: float, device: torch.device) -> float:
    """Return the highest value of any rank."""
    found = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def averaging(net: nn.Module, device: torch.device, **options: Any) -> nn.Module:
    """Wrap a network in DistributedDataParallel so that its steps can be recorded."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with torch.cuda.stream(stream):
        model = DistributedDataParallel(net, **options)
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
    return model


def ways(device: torch.device) -> tuple[str, ...]:
    return WAYS if device.type == "cuda" else (EAGER,)  # eager first, as recording may fail


# Data-parallel steps


def data_rows(args: argparse.Namespace, device: torch.device) -> Iterator[Record]:
    workload = WORKLOADS["conv-mnist"].small() if args.quick else WORKLOADS[args.workload]
    task = WorkloadTask(workload, args.dtype, device, seed=dist.get_rank())
    for name in args.networks:
        for way in ways(device):
            row = {"network": name, "way": way, "processes": dist.get_world_size()}
            yield row | measure_data(task, SPIKING[name], way, args)
            gc.collect()  # a graph must not outlive its connections


@dataclass(frozen=True)
class RankStep:
    """A network, its training step, and the memory that a graph of it holds."""

    net: nn.Module
    step: Callable[[], StepResult]
    held_bytes: int = 0


def measure_data(
    task: WorkloadTask, options: dict[str, Any], way: str, args: argparse.Namespace
) -> Record:
    """Verify a step, then time it in turns. If one process fails, all report it."""
    device, count, reason = task.device, dist.get_world_size(), ""
    ids = [device] if device.type == "cuda" else None
    wraps: dict[str, Any] = {"alone": lambda net: net}
    wraps["together"] = partial(averaging, device=device, device_ids=ids)
    steps: dict[str, RankStep] = {}
    try:
        for name, wrap in wraps.items():
            network = networks.spiking(task, **options, wrap=wrap)
            step, held = network.step(task, "training"), 0
            if way == GRAPH:
                step, held = record_graph(step)
            steps[name] = RankStep(network.net, step, held)
    except Exception as error:
        reason = first_line(error)
    if highest(bool(reason), device):
        return {"status": "unavailable", "reason": reason or "another process failed"}
    try:
        verify_data(task, **steps)
    except AssertionError as error:
        reason = str(error)
    if highest(bool(reason), device):
        return {"status": "wrong", "reason": reason or "another process is wrong"}
    row: Record = {"status": "ok"}
    clock = Timing.of(args).clock
    for name, one in steps.items():
        memory = clock.memory(Contender(name, one.step, held_bytes=one.held_bytes))
        row |= {f"{name}_bytes": value for value in memory.values()}
    taken: dict[str, list[float]] = {name: [] for name in steps}
    repetitions = 1 if args.quick else DATA_REPETITIONS
    for _ in range(args.rounds):
        for name, one in steps.items():
            seconds = 0.0
            if dist.get_rank() == 0 or name == "together":
                one.step()
                synchronize(device)
                start = time.perf_counter()
                for _ in range(repetitions):
                    one.step()
                synchronize(device)
                seconds = time.perf_counter() - start
            # `highest` lets the other processes wait for the first.
            taken[name].append(highest(seconds, device) / repetitions * 1e3)
    alone, together = spread(taken["alone"]), spread(taken["together"])
    row |= {"alone_ms": alone, "together_ms": together}
    images = count * task.workload.batch / together["median"] * 1e3
    row["images_per_second"] = round(images, 1)
    row["throughput"] = round(count * alone["median"] / together["median"], 4)
    return row


def verify_data(task: WorkloadTask, alone: RankStep, together: RankStep) -> None:
    """Compare the step of all processes with the steps of each process alone.

    Raises:
        AssertionError: the loss or the gradients differ.
    """
    task.restore(alone.net)
    task.restore(together.net)
    expected = alone.step()
    means = [g.clone() for g in expected.grads]
    for mean in means:
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    found, allowed = together.step(), ROUNDING[task.dtype]
    assert expected.loss is not None
    assert found.loss is not None
    for what, error in (
        ("the loss", difference([found.loss], [expected.loss])),
        ("gradients", difference(found.grads, means)),
    ):
        assert error <= allowed, f"{what} differ by {error:.3g}, allowed is {allowed:g}"


# Sharded event layers


def earlier_rows(args: argparse.Namespace) -> list[Record]:
    """Return the rows of the result that will be replaced: those of other numbers of ranks, if they
    were measured at the same revision with the same versions."""
    args.out = record.folder(args.out, args.quick)
    now = record.document(args.name, torch.device(args.device), args.quick, {})
    path = record.path_of(args.out, args.name, now["machine"])
    before = record.read(path) if path.exists() else {}
    same = all(before.get(key) == now[key] for key in ("revision", "dirty", "versions"))
    return before["rows"] if same else []


def event_rows(
    earlier: list[Record], args: argparse.Namespace, device: torch.device
) -> Iterator[Record]:
    usual = args.neurons == (QUICK_SIZES if args.quick else EVENT_SIZES)["neurons"]
    row = {"what": "weak scaling" if usual else "the largest"} | measure_events(args, device)
    key = row["what"], row["ranks"]
    rows = [r for r in earlier if (r["what"], r["ranks"]) != key] + [row]
    scaling = {r["ranks"]: milliseconds(r) for r in rows if r["what"] == "weak scaling"}
    for found in rows:
        one, taken = scaling.get(1), milliseconds(found)
        if one and taken and found["what"] == "weak scaling":
            found["efficiency"] = round(one / taken, 4)
        yield found


def milliseconds(row: Record) -> float | None:
    (contender,) = row.get("contenders", [{}])
    return contender["wall_ms"]["median"] if "wall_ms" in contender else None


def measure_events(args: argparse.Namespace, device: torch.device) -> Record:
    torch.manual_seed(0)
    drawn = torch.rand(args.T, args.batch, args.width) < RATE
    events = Events.from_dense(drawn.float().to(device))
    labels = torch.randint(CLASSES, (args.batch,)).to(device)
    torch.manual_seed(1 + dist.get_rank())
    net = event_network(args, events, device)
    temporal = sf.Temporal(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.0, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(temporal(events).mean(0), labels).backward()
        optimizer.step()
        dist.barrier()

    timing = Timing(Timing.of(args).clock, args.rounds, turn_ms=0.0)
    contender = Contender("events, neurons sharded", step)
    found = measure([contender], lambda *_: verify_events(device), timing)
    own = sum(p.numel() for shard in net[:-1] for p in shard.parameters())
    total = torch.tensor(own, device=device)
    dist.all_reduce(total)
    row = {
        "ranks": dist.get_world_size(),
        "neurons": args.width * (len(net) - 1),
        "parameters": int(total) + sum(p.numel() for p in net[-1].parameters()),
    } | found
    if found["contenders"][0]["status"] == "ok":
        row["samples_per_s"] = round(1e3 * args.batch / milliseconds(row), 2)
    return row


def event_network(args: argparse.Namespace, events: Events, device: torch.device) -> nn.Sequential:
    """Make each rank's shards, layer by layer at the requested activity."""
    layers: list[nn.Module] = []
    for _ in range(args.neurons // args.width * dist.get_world_size()):
        shard = NeuronShard(args.width, args.width, event_neuron(), device=device)
        scale_to_rate(shard.layer, events, RATE)
        with torch.no_grad():
            events = shard(events)
        layers.append(shard)
    torch.manual_seed(0)
    return nn.Sequential(*layers, Replicated(EventLinear(args.width, CLASSES, device=device)))


def verify_events(device: torch.device) -> None:
    """Compare a small sharded network with the whole one, on every rank.

    Raises:
        AssertionError: outputs or gradients differ, on all ranks.
    """
    torch.manual_seed(0)
    lists = "triton" if device.type == "cuda" else "numba"
    sizes = ((60, 70, event_neuron()), (70, 50, event_neuron()), (50, CLASSES, None))
    whole = nn.Sequential(*(EventLinear(i, o, n, impl=lists) for i, o, n in sizes)).to(device)
    events = Events.from_dense((torch.rand(20, 4, 60) < 0.2).float().to(device))
    scale_to_rate(whole, events, 0.2)
    sharded = shard_neurons(copy.deepcopy(whole))
    outputs = []
    for net in (whole, sharded):
        outputs.append(sf.Temporal(net)(events))
        outputs[-1].square().sum().backward()
    errors = {"outputs": _difference(outputs[1].detach(), outputs[0].detach())}
    for i, (layer, shard) in enumerate(zip(whole, sharded, strict=True)):
        first = bounds(layer.out_features) if isinstance(shard, NeuronShard) else None
        own = slice(None) if first is None else slice(*first[dist.get_rank() :][:2])
        for name in ("weight", "bias"):
            grad, expected = getattr(shard.layer, name).grad, getattr(layer, name).grad
            errors[f"gradients of {name} {i}"] = _difference(grad, expected[own])
    largest = torch.tensor(list(errors.values()), device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)  # all ranks have to agree on the outcome
    for what, error in zip(errors, largest.tolist(), strict=True):
        assert error <= EVENT_ROUNDING, f"{what} of a sharded network differ by {error:.3g}"


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


if __name__ == "__main__":
    main()
