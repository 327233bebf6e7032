"""Training steps of perceptrons on event lists, against dense ones: over activity and size.

    python -m benchmarks.events                     all cases
    python -m benchmarks.events --cases shd 47k     some of them
    torchrun --nproc_per_node 4 -m benchmarks.events sharded --largest 256500

The cases follow Finkbeiner and Neftci's poster "Drastically Improved SNN-Training Throughput on the
IPU by Utilizing Activation Sparsity". A step is forward, backward and update. Random weights are
scaled until each layer fires at the requested rate on the input; the learning rate is 0, so that
the activity does not change.

Layers on events choose between event lists and dense products; networks with lists only and with
dense products only are measured, too. On a GPU, the dense network also runs as a CUDA graph,
because small networks are bound by the host. The environment variable OMP_WAIT_POLICY, which
matters on a CPU, is recorded.

sharded: the neurons of each layer are split over ranks. Each rank adds as many neurons, in layers
of constant width, and as many events. Efficiency is the time of one rank over that of K ranks; the
ranks beside these K repeat their work.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import plots, runner
from benchmarks.processes import highest, run_processes
from benchmarks.runner import GRAPH, Contender, Record, Timing, contender_of, difference, measure
from spikefuse.distributed import NeuronShard, Replicated, shard_neurons
from spikefuse.distributed.neuron_sharding import bounds
from spikefuse.models import event_mlp, mlp, split_widths
from spikefuse.nn import EventLinear, Events, scale_to_rate

EVENTS, DENSE = "events", "dense, fused over time"
LISTS, PRODUCTS = "events, lists only", "events, dense products only"
REPLAY = ", CUDA graph"
DECAY, THRESHOLD, WIDTH, CUTOFF = 0.95, 1.0, 10.0, -0.1
CLASSES = 20
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
LARGE = 20_000  # neurons above which weights and moments take gigabytes: fewer contenders


@dataclass(frozen=True)
class Case:
    """A network and its input."""

    num_steps: int
    batch: int
    inputs: int
    input_rate: float  # share of the inputs that spike in a step
    hidden: tuple[int, ...]  # neurons of each layer
    rates: tuple[float, ...]  # activities of the hidden layers to measure
    excitatory: bool = False  # all weights are positive, which allows rates near 1


SHD_RATE = 48 / 700  # at most 48 of SHD's 700 inputs spike in a step; here in every step
SHD = Case(100, 48, 700, SHD_RATE, split_widths(3), (0.005, 0.02, 0.05, 0.2))
CASES = {
    "shd": SHD,
    "shd, excitatory": replace(SHD, rates=(0.02, 0.5, 0.9), excitatory=True),
    "nmnist": Case(100, 48, 2312, 32 / 2312, split_widths(3), (0.005, 0.02)),
    "dvs gesture": Case(50, 48, 4608, 0.01, split_widths(3), (0.005, 0.02)),
    "23k": Case(10, 24, 700, SHD_RATE, split_widths(5, 16), (0.01,)),
    "47k": Case(10, 24, 700, SHD_RATE, split_widths(5, 32), (0.01,)),
}
QUICK = Case(20, 4, 50, 0.2, (60, 50), (0.02, 0.1))

RATE = 0.01  # of neurons that fire in sharded layers
SHARDED_SIZES = {"width": 9_500, "T": 100, "batch": 48, "neurons": 47_500}
QUICK_SIZES = {"width": 100, "T": 10, "batch": 4, "neurons": 200}


def main(argv: list[str] | None = None) -> Path | None:
    parser = runner.make_parser("events", __doc__, rounds=7)
    parser.add_argument("what", nargs="?", choices=("activity", "sharded"), default="activity")
    parser.add_argument("--cases", nargs="*", choices=CASES, metavar="CASE",
                        help=f"of {', '.join(CASES)} (all)")  # fmt: skip
    parser.add_argument("--largest", type=int, help="neurons of each rank in one more sharded row")
    args = runner.parse(parser, argv)
    if args.what == "sharded":
        sizes = QUICK_SIZES if args.quick else SHARDED_SIZES
        vars(args).update({**sizes, "rate": RATE, "name": "event_scaling"})
        return run_processes(parser, args, sharded_rows, plots.weak_scaling)
    if args.cases is None:
        args.cases = ["shd"] if args.quick else list(CASES)
    device, timing = torch.device(args.device), replace(Timing.of(args), turn_ms=0.0)
    reused = device.type == "cpu" and reuse_memory()
    settings = {"rounds": args.rounds, "memory": "reused" if reused else "default"}
    settings["wait_policy"] = os.environ.get("OMP_WAIT_POLICY", "default")
    cases = {name: QUICK if args.quick else case for name, case in CASES.items()}
    return runner.run_cases(args, (
        (f"{name}, activity {rate:.1%}",
         lambda name=name, rate=rate: {"case": name}
         | measure_case(cases[name], rate, timing, device))
        for name in args.cases
        for rate in cases[name].rates
    ), settings, plots.crossover)  # fmt: skip


def reuse_memory() -> bool:
    """Let the C library keep freed memory: no separate mappings, no trimming."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # The threshold for mappings is limited to 32 MiB, so mappings are turned off altogether.
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def measure_case(case: Case, rate: float, timing: Timing, device: torch.device) -> Record:
    task = EventTask(case, rate, device)
    names = [DENSE, EVENTS, *((LISTS, PRODUCTS) if sum(case.hidden) <= LARGE else ())]
    names += [DENSE + REPLAY] if device.type == "cuda" else []
    contenders = [task.contender(n) for n in names]
    found = measure(contenders, lambda _, result: verify(task, result), timing)
    times = {c["name"]: c["wall_ms"]["median"] for c in found["contenders"] if "wall_ms" in c}
    return {
        "T": case.num_steps,
        "batch": case.batch,
        "neurons": sum(case.hidden),
        "rate": rate,
        "layer_rates": [round(r, 6) for r in task.rates],
        "samples_per_s": {n: round(1e3 * case.batch / t, 1) for n, t in times.items()},
        "times_dense": {n: round(times[DENSE] / t, 3) for n, t in times.items() if DENSE in times},
    } | found


# Networks

Step = tuple[Tensor, list[Tensor]]  # logits and gradients


def event_neuron() -> sf.LIF:
    surrogate = sf.surrogate.FastSigmoid(WIDTH, cutoff=CUTOFF)
    return sf.LIF(DECAY, THRESHOLD, detach_reset=True, surrogate=surrogate)


class EventNetwork:
    """A network to train. `call` returns the outputs `[T, B, classes]`."""

    def __init__(self, net: nn.Sequential, call: Callable[..., Tensor]) -> None:
        self.net, self.call = net, call
        on_gpu = next(net.parameters()).device.type == "cuda"
        self.optimizer = torch.optim.Adam(net.parameters(), lr=0.0, fused=True, capturable=on_gpu)

    def train(self, labels: Tensor, update: bool = True, **options: Any) -> Step:
        """Run a training step; return logits and gradients."""
        self.optimizer.zero_grad()
        logits = self.call(**options).mean(0)
        F.cross_entropy(logits, labels).backward()
        if update:
            self.optimizer.step()
        return logits.detach(), [p.grad for p in self.net.parameters() if p.grad is not None]


class EventTask:
    """The networks of a case at one rate, with the weights of `initial` and the same input."""

    def __init__(self, case: Case, rate: float, device: torch.device) -> None:
        self.case, self.device = case, device
        self.networks: dict[str, EventNetwork] = {}
        torch.manual_seed(0)
        spikes = torch.rand(case.num_steps, case.batch, case.inputs) < case.input_rate
        self.x = spikes.float().to(device)
        self.events = Events.from_dense(self.x)
        self.labels = torch.randint(CLASSES, (case.batch,), device=device)
        self.shape = case.inputs, CLASSES, (1, 1), case.hidden
        self.initial = event_mlp(event_neuron, *self.shape).to(device)
        if case.excitatory:
            with torch.no_grad():
                for layer in self.initial:
                    layer.weight.abs_()
        self.rates = list(scale_to_rate(self.initial, self.events, rate).values())
        self.networks[DENSE] = self.dense()
        step = self.networks[DENSE].train(self.labels, update=False, impl="reference")
        self.expected = step[0], [grad.clone() for grad in step[1]]

    def contender(self, name: str) -> Contender:
        """Make a network by name; with REPLAY appended, its step is recorded."""
        kind = name.removesuffix(REPLAY)
        if kind not in self.networks:
            self.networks[kind] = self.on_events(kind)
        step = partial(self.networks[kind].train, self.labels)
        way = runner.EAGER if name == kind else GRAPH
        return contender_of(name, way, step, (), self.device)

    def on_events(self, name: str) -> EventNetwork:
        net = event_mlp(event_neuron, *self.shape).to(self.device)
        for layer, initial in zip(net, self.initial, strict=True):
            layer.weight, layer.bias = initial.weight, initial.bias  # they do not change
            if name != EVENTS:
                lists = "triton" if self.device.type == "cuda" else "numba"
                layer.impl = lists if name == LISTS else "dense"
        return EventNetwork(net, partial(sf.Temporal(net), self.events))

    def dense(self) -> EventNetwork:
        net = mlp(event_neuron, *self.shape, norm=False).to(self.device)
        linears = [m for m in net if isinstance(m, nn.Linear)]
        for linear, layer in zip(linears, self.initial, strict=True):
            linear.load_state_dict({"weight": layer.weight, "bias": layer.bias})
        temporal = sf.Temporal(net, sf.memory.SaveAll())  # the fastest policy
        return EventNetwork(net, partial(temporal, self.x))


# Verification

# Allowed relative difference of logits and gradients. Matrix products sum in any order.
ROUNDING = 1e-3
# Rounding may flip a spike, from which on a sample differs: the allowed share of such samples, and
# the allowed difference of gradients with one.
DIVERGED, ANOTHER = 0.1, 0.5


def verify(task: EventTask, result: Step) -> None:
    """Compare a training step with one of the dense network in the eager loop.

    Raises:
        AssertionError: the step is wrong.
    """
    (logits, grads), (expected, wanted) = result, task.expected
    diverged = (logits - expected).norm(dim=1) > ROUNDING * expected.norm(dim=1)
    count, allowed = int(diverged.sum()), math.ceil(DIVERGED * len(logits))
    assert logits.isfinite().all(), "the logits are not finite"
    assert count <= allowed, f"logits of {count} samples differ, allowed are {allowed}"
    for i, (a, b) in enumerate(zip(grads, wanted, strict=True)):
        error = difference([a], [b])
        assert error <= (ANOTHER if count else ROUNDING), (
            f"gradient {i} differs by {error:.3g} of its norm"
        )


# Sharded event layers


def sharded_rows(args: argparse.Namespace, device: torch.device) -> Iterator[Record]:
    """Yield a row per number of ranks, and one of the largest network.

    Groups of fewer ranks repeat the same work at the same time.
    """
    count, one = dist.get_world_size(), 0.0
    for ranks in (k for k in range(1, count + 1) if count % k == 0):
        group, _ = dist.new_subgroups(ranks)
        row = {"what": "weak scaling"} | measure_sharded(args, args.neurons, group, device)
        (found,) = row["contenders"]
        if found["status"] == "ok":
            taken = found["wall_ms"]["median"]
            one = taken if ranks == 1 else one
            row |= {"efficiency": round(one / taken, 4)} if one else {}
        yield row
    if args.largest:
        row = measure_sharded(args, args.largest, dist.group.WORLD, device)
        yield {"what": "the largest"} | row


def measure_sharded(
    args: argparse.Namespace, neurons: int, group: Any, device: torch.device
) -> Record:
    torch.manual_seed(0)
    drawn = torch.rand(args.T, args.batch, args.width) < RATE
    events = Events.from_dense(drawn.float().to(device))
    labels = torch.randint(CLASSES, (args.batch,)).to(device)
    torch.manual_seed(1 + dist.get_rank(group))
    net = sharded_network(args.width, neurons, events, group)
    temporal = sf.Temporal(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.0, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(temporal(events).mean(0), labels).backward()
        optimizer.step()
        dist.barrier()

    timing = Timing(Timing.of(args).clock, args.rounds, turn_ms=0.0)
    contender = Contender("events, neurons sharded", step)
    found = measure([contender], lambda *_: verify_sharded(group, device), timing)
    total = torch.tensor([p.numel() for p in net[:-1].parameters()], device=device).sum()
    dist.all_reduce(total, group=group)
    row = {
        "ranks": dist.get_world_size(group),
        "neurons": args.width * (len(net) - 1),
        "parameters": int(total) + sum(p.numel() for p in net[-1].parameters()),
    } | found
    if found["contenders"][0]["status"] == "ok":
        milliseconds = found["contenders"][0]["wall_ms"]["median"]
        row["samples_per_s"] = round(1e3 * args.batch / milliseconds, 2)
    return row


def sharded_network(width: int, neurons: int, events: Events, group: Any) -> nn.Sequential:
    """Make each rank's shards, layer by layer at the requested activity."""
    layers: list[nn.Module] = []
    for _ in range(max(1, neurons // width) * dist.get_world_size(group)):
        shard = NeuronShard(width, width, event_neuron(), group, device=events.device)
        scale_to_rate(shard.layer, events, RATE)
        with torch.no_grad():
            events = shard(events)
        layers.append(shard)
    torch.manual_seed(0)
    return nn.Sequential(
        *layers, Replicated(EventLinear(width, CLASSES, device=events.device), group)
    )


def verify_sharded(group: Any, device: torch.device) -> None:
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
    sharded = shard_neurons(copy.deepcopy(whole), group)
    outputs = []
    for net in (whole, sharded):
        outputs.append(sf.Temporal(net)(events))
        outputs[-1].square().sum().backward()
    pairs = {"outputs": (outputs[1].detach(), outputs[0].detach())}
    for i, (layer, shard) in enumerate(zip(whole, sharded, strict=True)):
        own = slice(None)
        if isinstance(shard, NeuronShard):
            own = slice(*bounds(layer.out_features, group)[dist.get_rank(group) :][:2])
        for name in ("weight", "bias"):
            grad, expected = getattr(shard.layer, name).grad, getattr(layer, name).grad
            pairs[f"gradients of {name} {i}"] = grad, expected[own]
    for what, (found, wanted) in pairs.items():  # all ranks have to agree on the outcome
        error = highest(difference([found], [wanted]), device)
        assert error <= ROUNDING, f"{what} of a sharded network differ by {error:.3g}"


if __name__ == "__main__":
    main()
