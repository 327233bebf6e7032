"""Networks on events and dense networks with the same weights, as in Finkbeiner and Neftci's poster
"Drastically Improved SNN-Training Throughput on the IPU by Utilizing Activation Sparsity".

A step is forward, backward and update. Random weights are scaled until each layer fires at the
requested rate on this input. The learning rate is 0, so that the activity stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spikefuse as sf
from benchmarks.network_steps import graph_contender
from benchmarks.runner import Contender
from spikefuse.models import event_mlp, mlp, split_widths
from spikefuse.nn import Events, scale_to_rate

EVENTS, DENSE = "events", "dense, fused over time"
LISTS, PRODUCTS = "events, lists only", "events, dense products only"
REPLAY = ", CUDA graph"
DECAY, THRESHOLD, WIDTH, CUTOFF = 0.95, 1.0, 10.0, -0.1
CLASSES = 20


@dataclass(frozen=True)
class Case:
    """A network and its input.

    Args:
        num_steps, batch, inputs: of the input.
        input_rate: share of the inputs that spike in a step.
        hidden: neurons of each hidden layer.
        rates: of the hidden layers, each measured.
        excitatory: make all weights positive, which allows rates near 1.
    """

    num_steps: int
    batch: int
    inputs: int
    input_rate: float
    hidden: tuple[int, ...]
    rates: tuple[float, ...]
    excitatory: bool = False


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


def event_neuron() -> sf.LIF:
    surrogate = sf.surrogate.FastSigmoid(WIDTH, cutoff=CUTOFF)
    return sf.LIF(DECAY, THRESHOLD, detach_reset=True, surrogate=surrogate)


@dataclass
class EventNetwork:
    """A network to train: `call` returns the outputs `[T, B, classes]`.

    `layers` are the linear layers in order; `neurons` are those between them, if they are separate
    modules.
    """

    net: nn.Module
    call: Callable[[], Tensor]
    layers: list[nn.Module]
    neurons: list[nn.Module] = field(default_factory=list)

    def __post_init__(self) -> None:
        on_gpu = next(self.net.parameters()).device.type == "cuda"
        self.optimizer = torch.optim.Adam(
            self.net.parameters(), lr=0.0, fused=True, capturable=on_gpu
        )

    def spiking(self) -> list[nn.Module]:
        """Return the modules whose outputs are the layers' spikes, and the last layer."""
        return [*(self.neurons or self.layers[:-1]), self.layers[-1]]

    def train(self, labels: Tensor, update: bool = True) -> tuple[Tensor, list[Tensor]]:
        """Run a training step; return logits and gradients."""
        self.optimizer.zero_grad()
        logits = self.call().mean(0)
        F.cross_entropy(logits, labels).backward()
        if update:
            self.optimizer.step()
        return logits.detach(), [p.grad for p in self.net.parameters() if p.grad is not None]


class EventTask:
    """The networks of a case at one rate, with the same weights and input.

    Attributes:
        x, events: the input, dense and as events.
        initial: the weights, as layers on events.
        rates: of each hidden layer.
        networks: by name.
    """

    def __init__(self, case: Case, rate: float, device: torch.device) -> None:
        self.case, self.device = case, device
        self.networks: dict[str, EventNetwork] = {}
        torch.manual_seed(0)
        spikes = torch.rand(case.num_steps, case.batch, case.inputs) < case.input_rate
        self.x = spikes.float().to(device)
        self.events = Events.from_dense(self.x)
        self.labels = torch.randint(CLASSES, (case.batch,), device=device)
        self.initial = self._event_mlp()
        if case.excitatory:
            with torch.no_grad():
                for layer in self.initial:
                    layer.weight.abs_()
        self.rates = list(scale_to_rate(self.initial, self.events, rate).values())

    def _event_mlp(self) -> nn.Sequential:
        case = self.case
        net = event_mlp(event_neuron, case.inputs, CLASSES, (1, 1), case.hidden)
        return net.to(self.device)

    def contender(self, name: str) -> Contender:
        """Make a network by name; with REPLAY appended, its step is recorded."""
        kind = name.removesuffix(REPLAY)
        if name != kind and kind != DENSE:
            reason = "the host reads the number of events of each layer: it cannot be recorded"
            return Contender(name, unavailable=reason)
        if kind not in self.networks:
            self.networks[kind] = self.dense() if kind == DENSE else self.on_events(kind)
        step = functools.partial(self.networks[kind].train, self.labels)
        if name == kind:
            return Contender(name, step)
        return graph_contender(name, step, self.device)

    def on_events(self, name: str) -> EventNetwork:
        net = self._event_mlp()
        for layer, initial in zip(net, self.initial, strict=True):
            layer.weight, layer.bias = initial.weight, initial.bias  # they do not change
            if name != EVENTS:
                lists = "triton" if self.device.type == "cuda" else "numba"
                layer.impl = lists if name == LISTS else "dense"
        temporal = sf.Temporal(net)
        return EventNetwork(net, lambda: temporal(self.events), list(net))

    def dense(self) -> EventNetwork:
        net = mlp(event_neuron, self.case.inputs, CLASSES, (1, 1), self.case.hidden, norm=False)
        net.to(self.device)
        copy_weights(self.initial, net)
        linears = [m for m in net if isinstance(m, nn.Linear)]
        neurons = [m for m in net if isinstance(m, sf.LIF)]
        temporal = sf.Temporal(net, sf.memory.SaveAll())  # the fastest policy
        return EventNetwork(net, lambda: temporal(self.x), linears, neurons)


def copy_weights(layers: nn.Sequential, dense: nn.Sequential) -> None:
    """Copy the weights of layers on events to a dense network."""
    linears = [m for m in dense if isinstance(m, nn.Linear)]
    for linear, layer in zip(linears, layers, strict=True):
        linear.load_state_dict({"weight": layer.weight, "bias": layer.bias})
