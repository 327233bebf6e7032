"""Networks on events and dense ones of equal weights, as Finkbeiner and Neftci's poster has them.

The poster: "Drastically Improved SNN-Training Throughput on the IPU by Utilizing Activation
Sparsity". A step is forward, backward and update. There are two settings of activity. Natural:
random weights, scaled so that each layer fires at the rate asked for on this very input. Fixed:
each layer hands on as many spikes in every step as the rate allows, drawn at random, in place of
its own, and its neurons still compute. The learning rate is 0, which changes nothing of the work,
so that activity stays. All contenders have the same weights, and the same input each in the form
that it takes. On a GPU the dense network and the loop also run as replays of a CUDA graph, update
included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spikefuse as sf
from benchmarks.runner import Contender, first_line
from benchmarks.steps import graphed
from spikefuse.models import event_mlp, mlp, split_widths
from spikefuse.nn import EventLinear, Events, RowAdam, scale_to_rate

EVENTS, LAZY = "events", "events, RowAdam"
LISTS, PRODUCTS = "events, lists only", "events, dense products only"
DENSE, LOOP = "dense, fused over time", "dense, compiled per step"
GRAPH = ", CUDA graph"
# Why there is no such contender of the networks on events.
NO_GRAPH = (
    "of each layer's events the host reads how many there are, to make lists of that length and to "
    "choose between lists and dense products: such a step can't be recorded"
)
DECAY, THRESHOLD, WIDTH, CUTOFF = 0.95, 1.0, 10.0, -0.1
CLASSES = 20
NATURAL, FIXED = "natural", "fixed"


@dataclass(frozen=True)
class Case:
    """A network and its input.

    Args:
        num_steps, batch, inputs: of the input.
        input_rate: share of the inputs that spike in a step.
        hidden: neurons of each hidden layer.
        rates: of the hidden layers, each measured.
        bars: how many times faster than dense on a CPU, by rate.
        loop_bar: how many times faster our best is than the compiled loop on a GPU.
        activity: NATURAL or FIXED.
    """

    num_steps: int
    batch: int
    inputs: int
    input_rate: float
    hidden: tuple[int, ...]
    rates: tuple[float, ...]
    bars: tuple[tuple[float, float], ...] = ()
    loop_bar: float | None = None
    activity: str = NATURAL


# Random weights reach no more in every layer.
HIGHEST = 0.2
SWEEP = (0.005, 0.02, 0.05, HIGHEST)
# Of 700 inputs at most 48 spike in a step of SHD, which is taken for all steps here.
SHD_RATE = 48 / 700
SHD = Case(100, 48, 700, SHD_RATE, split_widths(3), SWEEP, ((0.02, 6.0), (0.005, 12.0)), 30.0)
CASES = {
    "shd": SHD,
    "shd, fixed": replace(SHD, rates=(0.02, 0.5, 0.9), bars=(), activity=FIXED),
    "nmnist": Case(100, 48, 2312, 32 / 2312, split_widths(3), (0.005, 0.02)),
    "dvs gesture": Case(50, 48, 4608, 0.01, split_widths(3), (0.005, 0.02)),
    "23k": Case(10, 24, 700, SHD_RATE, split_widths(5, 16), (0.01,), ((0.01, 8.0),)),
    "47k": Case(10, 24, 700, SHD_RATE, split_widths(5, 32), (0.01,), ((0.01, 8.0),)),
}


def neuron() -> sf.LIF:
    surrogate = sf.surrogate.FastSigmoid(WIDTH, cutoff=CUTOFF)
    return sf.LIF(DECAY, THRESHOLD, detach_reset=True, surrogate=surrogate)


class Step(nn.Module):
    """One step in time of the whole dense network: `(x, potentials)` to `(y, potentials)`. With
    `given`, each layer hands on these spikes in place of its own."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)

    def forward(
        self, s: Tensor, potentials: Sequence[Tensor], given: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        *hidden, last = self.linears
        after = []
        for i, (linear, v) in enumerate(zip(hidden, potentials, strict=True)):
            h = DECAY * v + linear(s)
            u = h - THRESHOLD
            smooth = torch.where(u >= CUTOFF, u / (1 + WIDTH * u.abs()), 0.0)
            spikes = (u >= 0).to(h.dtype) if given is None else given[i]
            s = spikes + smooth - smooth.detach()
            after.append(torch.where(u >= 0, 0.0, h))
        return last(s), after


class _Handed(torch.autograd.Function):
    """Other spikes in place of a layer's own, through which gradients go back to the own ones."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, given: Tensor, places: Tensor | None) -> Tensor:
        ctx.places, ctx.size = places, own.shape
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.places is None:
            return grad, None, None
        own = grad.new_zeros(ctx.size)
        found = ctx.places >= 0
        own[ctx.places[found]] = grad[found]
        return own, None, None


class Handing(nn.Module):
    """A layer on events, or a neuron, that hands on spikes drawn beforehand."""

    def __init__(self, layer: nn.Module, given: Events) -> None:
        super().__init__()
        self.layer, self.given = layer, given
        self.spikes, self.marks = given.to_dense(), given.is_fired()
        self.places: Tensor | None = None

    def forward(self, x: Any) -> Any:
        own = self.layer(x)
        if isinstance(own, Tensor):
            return _Handed.apply(own, self.spikes.view_as(own), None)
        if own.values is None:
            return self.given
        if self.places is None:  # the same in every step
            self.places = _places(own, self.given)
        values = _Handed.apply(own.values, self.marks, self.places)
        return replace(self.given, values=values)


def _places(own: Events, given: Events) -> Tensor:
    """For each given entry the place in the own list of the same site, -1 where it has none."""
    width = own.shape[2]
    sites, wanted = (e.rows() * width + e.indices for e in (own, given))
    ordered, order = sites.sort()
    at = torch.searchsorted(ordered, wanted).clamp(max=max(len(sites) - 1, 0))
    if not len(sites):
        return torch.full_like(wanted, -1)
    return torch.where(ordered[at] == wanted, order[at], -1)


def adam(net: nn.Module, capturable: bool = False) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.0, fused=True, capturable=capturable)


def drawn(shape: tuple[int, int, int], rate: float, device: torch.device) -> Events:
    """As many spikes in each row as the rate allows, at random sites."""
    count = max(1, int(rate * shape[2]))
    sites = torch.rand(*shape, device=device).topk(count, dim=2).indices
    return Events.from_dense(torch.zeros(*shape, device=device).scatter_(2, sites, 1.0))


@dataclass
class Network:
    """What trains: `call` gives the outputs `[T, B, classes]`.

    `layers` are the linear layers in their order, `neurons` those between them where these are
    modules of their own.
    """

    net: nn.Module
    call: Callable[[], Tensor]
    optimizer: torch.optim.Optimizer
    layers: list[nn.Module]
    neurons: list[nn.Module] = field(default_factory=list)

    def firing(self) -> list[nn.Module]:
        """The modules whose outputs are those of a layer's neurons, and the last layer."""
        return [*(self.neurons or self.layers[:-1]), self.layers[-1]]

    def train(self, labels: Tensor, update: bool = True) -> tuple[Tensor, list[Tensor]]:
        """(logits, gradients) of a training step."""
        self.optimizer.zero_grad()
        logits = self.call().mean(0)
        F.cross_entropy(logits, labels).backward()
        if update:
            self.optimizer.step()
        return logits.detach(), [p.grad for p in self.net.parameters() if p.grad is not None]


@dataclass
class Work:
    """The networks of a case at one rate, on a device.

    Attributes:
        x, events: the input, in both forms.
        layers: the initial weights, as layers on events.
        rates: of each hidden layer.
        given: what each hidden layer hands on if activity is fixed.
        networks: by name, those made.
    """

    case: Case
    rate: float
    device: torch.device
    networks: dict[str, Network] = field(default_factory=dict)

    def __post_init__(self) -> None:
        case = self.case
        torch.manual_seed(0)
        spikes = torch.rand(case.num_steps, case.batch, case.inputs) < case.input_rate
        self.x = spikes.float().to(self.device)
        self.events = Events.from_dense(self.x)
        self.labels = torch.randint(CLASSES, (case.batch,), device=self.device)
        self.initial = self.on_events()
        self.given: list[Events] | None = None
        if case.activity == NATURAL:
            self.rates = list(scale_to_rate(self.initial, self.events, self.rate).values())
        else:
            steps, batch = case.num_steps, case.batch
            self.given = [drawn((steps, batch, n), self.rate, self.device) for n in case.hidden]
            inputs = [self.events, *self.given]
            for layer, x in zip(self.initial[:-1], inputs, strict=False):
                scale_to_rate(nn.Sequential(layer), x, min(self.rate, HIGHEST))
            self.rates = [e.rate for e in self.given]

    def on_events(self, **options: Any) -> nn.Sequential:
        case = self.case
        return event_mlp(neuron, case.inputs, CLASSES, (1, 1), case.hidden, **options).to(
            self.device
        )

    def handing(self, hidden: Sequence[nn.Module]) -> list[nn.Module]:
        if self.given is None:
            return list(hidden)
        return [Handing(m, given) for m, given in zip(hidden, self.given, strict=True)]

    def dense(self) -> nn.Sequential:
        net = mlp(neuron, self.case.inputs, CLASSES, (1, 1), self.case.hidden, norm=False)
        linears = [m for m in net if isinstance(m, nn.Linear)]
        with torch.no_grad():
            for linear, layer in zip(linears, self.initial, strict=True):
                linear.weight.copy_(layer.weight.t())
                linear.bias.copy_(layer.bias)
        return net.to(self.device)

    def contenders(self, names: Sequence[str]) -> list[Contender]:
        return [self.contender(name) for name in names]

    def contender(self, name: str) -> Contender:
        """One of the networks as it is; or, with GRAPH behind its name, its replay, which has the
        same weights."""
        kind = name.removesuffix(GRAPH)
        if name != kind and kind.startswith(EVENTS):
            return Contender(name, unavailable=NO_GRAPH)
        if kind not in self.networks:
            self.networks[kind] = self.network(kind)
        network = self.networks[kind]
        if name == kind:
            return Contender(name, functools.partial(network.train, self.labels))
        optimizer = adam(network.net, capturable=True)
        self.networks[name] = network = replace(network, optimizer=optimizer)
        try:
            run, held = graphed(functools.partial(network.train, self.labels))
        except Exception as error:  # whatever it is: the reason is the result
            return Contender(name, unavailable=first_line(error))
        return Contender(name, run, held_bytes=held)

    def network(self, name: str) -> Network:
        if name == LOOP:
            step = Step([m for m in self.dense() if isinstance(m, nn.Linear)])
            torch.compiler.reset()  # which else gives up after so many networks of one class
            call = functools.partial(self.loop, torch.compile(step))
            return Network(step, call, adam(step), list(step.linears))
        if name == DENSE:
            net = self.dense()
            layers = [m for m in net if isinstance(m, nn.Linear)]
            neurons = [m for m in net if isinstance(m, sf.LIF)]
            handing = iter(self.handing(neurons))
            whole = nn.Sequential(*[next(handing) if m in neurons else m for m in net])
            dense = sf.Temporal(whole, sf.memory.SaveAll())  # the fastest
            return Network(net, lambda: dense(self.x), adam(net), layers, neurons)
        net = self.on_events(sparse_grad=name == LAZY)
        for layer, initial in zip(net, self.initial, strict=True):
            layer.weight, layer.bias = initial.weight, initial.bias  # which stay as they are
            assert isinstance(layer, EventLinear)
            if name in (LISTS, PRODUCTS):
                lists = "triton" if self.device.type == "cuda" else "numba"
                layer.impl = lists if name == LISTS else "dense"
        layers = list(net)
        on_events = sf.Temporal(nn.Sequential(*self.handing(layers[:-1]), layers[-1]))
        optimizer = RowAdam(list(net.parameters()), lr=0.0) if name == LAZY else adam(net)
        return Network(net, lambda: on_events(self.events), optimizer, layers)

    def loop(self, step: Callable[..., Any], given: Sequence[Tensor] | None = None) -> Tensor:
        rows = self.case.batch
        potentials = [torch.zeros(rows, n, device=self.device) for n in self.case.hidden]
        if given is None and self.given is not None:
            given = [e.to_dense() for e in self.given]
        outputs = []
        for t, x in enumerate(self.x):
            spikes = None if given is None else [s[t] for s in given]
            y, potentials = step(x, potentials, spikes)
            outputs.append(y)
        return torch.stack(outputs)
