"""Training steps of perceptrons on event lists, against dense ones: over activity and size.

    python -m benchmarks.events                     all cases
    python -m benchmarks.events --cases shd 47k     some of them

The cases follow Finkbeiner and Neftci's poster "Drastically Improved SNN-Training Throughput on the
IPU by Utilizing Activation Sparsity". A step is forward, backward and update. Random weights are
scaled until each layer fires at the requested rate on the input; the learning rate is 0, so that
the activity does not change.

Layers on events choose between event lists and dense products; networks with lists only and with
dense products only are measured, too. On a GPU, the dense network also runs as a CUDA graph,
because small networks are bound by the host. The environment variable OMP_WAIT_POLICY, which
matters on a CPU, is recorded.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import plots, runner
from benchmarks.runner import GRAPH, Contender, Record, Timing, contender_of, measure
from spikefuse.models import event_mlp, mlp, split_widths
from spikefuse.nn import Events, scale_to_rate

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


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("events", __doc__, rounds=7)
    parser.add_argument("--cases", nargs="*", choices=CASES, metavar="CASE",
                        help=f"of {', '.join(CASES)} (all)")  # fmt: skip
    args = runner.parse(parser, argv)
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
    checks: dict[str, Record] = {}

    def check(contender: Contender, result: Step) -> None:
        checks[contender.name] = verify(task, contender.name.removesuffix(REPLAY), result)

    names = [DENSE, EVENTS, *((LISTS, PRODUCTS) if sum(case.hidden) <= LARGE else ())]
    names += [DENSE + REPLAY] if device.type == "cuda" else []
    found = measure([task.contender(n) for n in names], check, timing)
    times = {c["name"]: c["wall_ms"]["median"] for c in found["contenders"] if "wall_ms" in c}
    return {
        "T": case.num_steps,
        "batch": case.batch,
        "neurons": sum(case.hidden),
        "rate": rate,
        "layer_rates": [round(r, 6) for r in task.rates],
        "samples_per_s": {n: round(1e3 * case.batch / t, 1) for n, t in times.items()},
        "times_dense": {n: round(times[DENSE] / t, 3) for n, t in times.items() if DENSE in times},
        "checks": checks,
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

    def contender(self, name: str) -> Contender:
        """Make a network by name; with REPLAY appended, its step is recorded."""
        kind = name.removesuffix(REPLAY)
        if kind not in self.networks:
            self.networks[kind] = self.dense() if kind == DENSE else self.on_events(kind)
        step = partial(self.networks[kind].train, self.labels)
        return (
            Contender(name, step)
            if name == kind
            else contender_of(name, GRAPH, step, (), self.device)
        )

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
        copy_weights(self.initial, net)
        temporal = sf.Temporal(net, sf.memory.SaveAll())  # the fastest policy
        return EventNetwork(net, partial(temporal, self.x))


def copy_weights(layers: nn.Sequential, dense: nn.Sequential) -> None:
    """Copy the weights `[I, O]` of layers on events to a dense network."""
    linears = [m for m in dense if isinstance(m, nn.Linear)]
    for linear, layer in zip(linears, layers, strict=True):
        linear.load_state_dict({"weight": layer.weight, "bias": layer.bias})


# Verification

# A spike may differ only if its potential is nearer to the threshold than NEAR, and at most at the
# share FLIPS of all sites. A potential sums some hundred float32 numbers of about 1 over 20 steps.
NEAR, FLIPS = 1e-5, 1e-5
# The surrogate's slope changes by up to 2 WIDTH = 20 times the error of a potential. Scaled-up
# weights at high activity make potentials sums of larger numbers, on events and dense alike.
ROUNDING, HIGH_ROUNDING, HIGH_RATE = 1e-4, 5e-4, 0.1
REPEATED = 1e-3  # two steps from the same weights; matrix products sum in any order


def verify(task: EventTask, name: str, result: Step) -> Record:
    """Check a training step; return its differences from the expected one.

    A dense network must agree with the eager loop. On events, rounding occasionally decides whether
    a neuron fires, and its sample diverges from then on. Each layer is therefore compared with
    float64 for the spikes that it received and the gradient that arrived at its own spikes.

    Raises:
        AssertionError: the network is wrong.
    """
    network, found, largest = task.networks[name], Deviation(), 0.0
    if name == DENSE:
        expected = network.train(task.labels, update=False, impl="reference")
    else:
        expected, layers = trace(task, network)
        found.compare(layers)
        assert found.margin <= NEAR, f"a spike differs {found.margin:.3g} from its threshold"
        allowed = 2 + FLIPS * found.sites
        assert found.flips <= allowed, f"{found.flips} of {found.sites} spikes differ"
        rounding = ROUNDING if max(task.rates) < HIGH_RATE else HIGH_ROUNDING
        for what, error in found.errors.items():
            assert error <= rounding, f"{what} differs by {error:.3g} of its norm"
    for a, b in zip((result[0], *result[1]), (expected[0], *expected[1]), strict=True):
        error = float((a - b).norm()) / max(float(b.norm()), 1e-30)
        largest = max(largest, error)
        assert error <= REPEATED, f"the step differs by {error:.3g} of its norm from another one"
    errors = {what: float(f"{error:.3g}") for what, error in found.errors.items()}
    return {"sites": found.sites, "flips": found.flips, "errors": errors, "step": largest}


# A layer on events in a training step, its input, and its output with a gradient.
LayerTrace = tuple[nn.Module, Events, Any]


def trace(task: EventTask, network: EventNetwork) -> tuple[Step, list[LayerTrace]]:
    """Run a training step without update, and record the inputs and outputs of the layers."""
    layers: list[LayerTrace] = []

    def save(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        (output.values if isinstance(output, Events) else output).retain_grad()
        layers.append((module, args[0], output))

    hooks = [layer.register_forward_hook(save) for layer in network.net]
    try:
        return network.train(task.labels, update=False), layers
    finally:
        for hook in hooks:
            hook.remove()


class Deviation:
    """Differences of layers on events from float64.

    Of `sites` spikes, `flips` spikes or candidates for a gradient differ, whose potentials are
    nearer to the threshold or cutoff than `margin`; `errors` are relative, by quantity.
    """

    def __init__(self) -> None:
        self.sites, self.flips, self.margin = 0, 0, 0.0
        self.errors: dict[str, float] = {}

    def add(self, what: str, found: Tensor, expected: Tensor) -> None:
        error = float((found.double() - expected).norm()) / max(float(expected.norm()), 1e-30)
        self.errors[what] = max(error, self.errors.get(what, 0.0))

    def compare(self, layers: list[LayerTrace]) -> None:
        for i, (module, spikes, output) in enumerate(layers):
            inputs, weight = spikes.to_dense().detach().double(), module.weight.detach().double()
            y = inputs @ weight.t() + module.bias.detach().double()
            if isinstance(output, Events):
                grad = self.current_gradient(y, output)
            else:
                self.add("outputs", output.detach().reshape(y.shape), y)
                grad = output.grad.reshape(y.shape).double()
            expected = grad.flatten(0, 1).t() @ inputs.flatten(0, 1)
            self.add("gradient of weights", module.weight.grad, expected)
            self.add("gradient of biases", module.bias.grad, grad.sum((0, 1)))
            if i:
                listed = _listed(spikes)
                expected = (grad @ weight)[listed]
                self.add("gradient of spikes", _grad(spikes)[listed], expected)

    def current_gradient(self, y: Tensor, spikes: Events) -> Tensor:
        """Compare the spikes and return the gradient of the currents `y`; see docs/events.md.

        The float64 neurons are reset where the network's neurons fired.
        """
        fired, candidates, u = spikes.to_dense().detach() > 0, _listed(spikes), torch.empty_like(y)
        v = torch.zeros_like(y[0])
        for t in range(len(y)):
            h = DECAY * v + y[t]
            u[t], v = h - THRESHOLD, torch.where(fired[t], 0.0, h)
        self.sites += u.numel()
        for level, found in ((0.0, fired), (CUTOFF, candidates)):
            flipped = (u >= level) != found
            self.flips += int(flipped.sum())
            if flipped.any():
                self.margin = max(self.margin, float((u - level).abs()[flipped].max()))
        slope = 1 / (WIDTH * u.abs() + 1).square()
        grad = torch.where(candidates, _grad(spikes) * slope, 0.0)
        back = torch.zeros_like(v)
        for t in reversed(range(len(y))):
            back = grad[t] + DECAY * torch.where(fired[t], 0.0, back)
            grad[t] = back
        return grad


def _grad(x: Events) -> Tensor:
    return x.with_values(x.values.grad).to_dense().double()


def _listed(x: Events) -> Tensor:
    """Return the sites in a list of events."""
    return x.with_values(torch.ones(len(x.indices), device=x.device)).to_dense() > 0


if __name__ == "__main__":
    main()
