"""Weak scaling of a network on event lists, its neurons sharded over ranks.

    python -m benchmarks.event_scaling                      on 1, 2 and 4 GPUs
    python -m benchmarks.event_scaling --ranks 1 2 --quick --device cpu

Each rank adds the same number of neurons in layers of constant width: K ranks have K times as many
layers, as in Finkbeiner and Neftci's poster. The input is as wide and as active as a layer, so each
rank also adds the same number of weights and events. Efficiency is the time of one rank divided by
the time of K ranks. A last run has a million neurons. The script starts torchrun for each number of
ranks; started by torchrun, possibly on several nodes, it measures these ranks alone. Each run first
compares a small sharded network with the whole network.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import plots, record, runner
from benchmarks.events import CLASSES, event_neuron
from benchmarks.runner import Contender, Record, Timing, measure
from spikefuse.distributed import NeuronShard, Replicated, shard_neurons
from spikefuse.distributed.neuron_sharding import bounds
from spikefuse.nn import EventLinear, Events, scale_to_rate

SCALING, LARGEST = "weak scaling", "the largest"
ROUNDING = 1e-5  # allowed difference, of the largest value; ranks sum in another order
RATE = 0.01  # share of neurons that fire

# Neurons of each rank and of a layer, time steps, samples, and neurons of the last run.
USUAL = {"neurons": 47_500, "width": 9_500, "T": 100, "batch": 48, "largest": 1_000_000}
QUICK = {"neurons": 200, "width": 100, "T": 10, "batch": 4, "largest": 0}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = runner.make_parser("event_scaling", __doc__, rounds=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="(1 2 4)")
    parser.add_argument("--neurons", type=int, help="neurons of each rank (47,500)")
    args = runner.parse(parser, argv)
    sizes = QUICK if args.quick else USUAL
    neurons = args.neurons or sizes["neurons"]
    vars(args).update({**sizes, "neurons": neurons, "rate": RATE})
    if neurons < args.width:
        parser.error(f"--neurons must be at least {args.width}, the neurons of a layer")
    return args


def main(argv: list[str] | None = None) -> Path | None:
    args = arguments(argv)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return measure_these(args)
    return runner.write_rows(args, rows(args), describe, plot=plots.weak_scaling)


def describe(row: Record) -> str:
    if "neurons" not in row:
        return f"{row['ranks']} ranks: {row['status']}, {row['reason']}"
    return f"{row['ranks']} ranks, {row['neurons']:,} neurons: {runner.describe(row)}"


def rows(args: argparse.Namespace) -> Iterator[Record]:
    one = None
    for ranks in sorted(set(args.ranks)):
        row: Record = {"what": SCALING} | measure_ranks(args, ranks, args.neurons)
        taken = milliseconds(row)
        one = taken if ranks == 1 else one
        if one and taken:
            row["efficiency"] = round(one / taken, 4)
        yield row
    most = max(args.ranks)
    neurons = math.ceil(args.largest / (most * args.width)) * args.width
    if neurons > args.neurons:
        yield {"what": LARGEST} | measure_ranks(args, most, neurons)


def measure_ranks(args: argparse.Namespace, ranks: int, neurons: int) -> Record:
    """Measure `ranks` processes with `neurons` each; return their row."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    command += [str(ranks), "-m", "benchmarks.event_scaling", *["--quick"] * args.quick]
    command += ["--device", args.device, "--neurons", str(neurons), "--rounds", str(args.rounds)]
    for _ in range(2):  # another program may take the port that torchrun has chosen
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([*command, "--out", folder], cwd=record.ROOT, check=False)
            paths = list(Path(folder).glob("*.json"))
            if done.returncode == 0 and len(paths) == 1:
                (row,) = record.read(paths[0])["rows"]
                return dict(row)
    # The other rows are still measured.
    return {"ranks": ranks, "status": "failed", "reason": f"exit code {done.returncode}"}


def milliseconds(row: Record) -> float | None:
    (contender,) = row.get("contenders", [{}])
    return contender["wall_ms"]["median"] if "wall_ms" in contender else None


# In the processes that torchrun started


def measure_these(args: argparse.Namespace) -> Path | None:
    """Measure the ranks that torchrun started; return the path of the result on rank 0."""
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        row = measure_step(args, device)
        return None if dist.get_rank() else runner.write_rows(args, [row], describe)
    finally:
        dist.destroy_process_group()


def measure_step(args: argparse.Namespace, device: torch.device) -> Record:
    torch.manual_seed(0)
    drawn = torch.rand(args.T, args.batch, args.width) < RATE
    events = Events.from_dense(drawn.float().to(device))
    labels = torch.randint(CLASSES, (args.batch,)).to(device)
    torch.manual_seed(1 + dist.get_rank())
    net = make_network(args, events, device)
    temporal = sf.Temporal(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.0, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(temporal(events).mean(0), labels).backward()
        optimizer.step()
        dist.barrier()

    timing = Timing(Timing.of(args).clock, args.rounds, turn_ms=0.0)
    contender = Contender("events, neurons sharded", step)
    found = measure([contender], lambda *_: verify(device), timing)
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


def make_network(args: argparse.Namespace, events: Events, device: torch.device) -> nn.Sequential:
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


def verify(device: torch.device) -> None:
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
        assert error <= ROUNDING, f"{what} of a sharded network differ by {error:.3g}"


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


if __name__ == "__main__":
    main()
