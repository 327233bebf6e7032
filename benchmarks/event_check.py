"""Verification of a training step of a network of LIF neurons, on events or dense.

Rounding occasionally decides whether a neuron fires, and its sample diverges from then on, so two
correct networks may have little in common. Each layer is therefore compared with float64 on its
own, for the spikes that it actually received and the gradient of its own spikes that actually
arrived: spikes, gradients of weights and biases, and the gradient of the layer below. In the
float64 layer, a neuron is reset where that of the network fired.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.event_networks import CUTOFF, DECAY, THRESHOLD, WIDTH, EventNetwork, EventTask
from spikefuse.nn import Events

# A potential sums some hundred float32 numbers of about 1, with a memory of 20 steps. Only nearer
# to the threshold than this may a spike differ, at this share of all sites.
NEAR, FLIPS = 1e-5, 1e-5
# The surrogate's slope changes by up to 2 WIDTH = 20 times the error of a potential. Scaled-up
# weights at high activity make potentials sums of larger numbers, on events and dense alike.
ROUNDING, HIGH_ROUNDING, HIGH_RATE = 1e-4, 5e-4, 0.1
# For networks that do not report which neurons are candidates for a gradient: rounding at the
# cutoff adds or removes terms of sums of tens of thousands.
LOOSE_ROUNDING = 3e-2
REPEATED = 1e-3  # two steps from the same weights; matrix products sum in any order

Step = tuple[Tensor, list[Tensor]]  # logits and gradients


@dataclass
class LayerTrace:
    """What went through a layer in a training step.

    Args:
        module: `EventLinear` or `nn.Linear`.
        inputs: spikes `[T, B, I]`.
        grad_inputs, carried: gradient of the spikes of the layer below, and the sites that carry
            one; None for the first layer.
        outputs: spikes `[T, B, O]`; currents of the last layer.
        candidates: the sites whose spikes carry a gradient; None if not reported.
        grad: gradient of `outputs`.
    """

    module: nn.Module
    inputs: Tensor
    grad_inputs: Tensor | None
    carried: Tensor | None
    outputs: Tensor
    candidates: Tensor | None
    grad: Tensor

    def parameters(self) -> list[tuple[Tensor, Tensor]]:
        """Return (value, gradient) of the weights `[I, O]` and of the bias."""
        found = []
        for p in (self.module.weight, self.module.bias):
            pair = p.detach(), p.grad
            found.append((pair[0].t(), pair[1].t()) if p.ndim == 2 else pair)
        return found


@dataclass
class Deviation:
    """Differences of a network from float64, layer by layer on the same inputs.

    Attributes:
        sites: number of spikes compared; `flips` and `candidates` of them differ.
        margin: largest distance of a differing potential from the threshold or cutoff.
        errors: largest relative differences of gradients, by kind.
        allowed: of `errors`.
    """

    sites: int = 0
    flips: int = 0
    candidates: int = 0
    margin: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)
    allowed: float = ROUNDING

    def add(self, what: str, found: Tensor, expected: Tensor) -> None:
        error = float((found.double() - expected).norm()) / max(float(expected.norm()), 1e-30)
        self.errors[what] = max(error, self.errors.get(what, 0.0))

    def verify(self) -> None:
        """
        Raises:
            AssertionError: the network is wrong.
        """
        flips = self.flips + self.candidates
        assert self.margin <= NEAR, f"a spike differs {self.margin:.3g} from its threshold"
        assert flips <= 2 + FLIPS * self.sites, f"{flips} of {self.sites} spikes differ"
        for what, error in self.errors.items():
            assert error <= self.allowed, f"{what} differs by {error:.3g} of its norm"

    def about(self) -> dict[str, Any]:
        """Return the differences, for the result file."""
        return {
            "sites": self.sites,
            "flips": self.flips,
            "candidate_flips": self.candidates,
            "margin": float(f"{self.margin:.3g}"),
            "errors": {what: float(f"{error:.3g}") for what, error in self.errors.items()},
        }


def verify(task: EventTask, name: str, result: Step) -> dict[str, Any]:
    """Check the result of a network's step; return its differences from float64.

    Raises:
        AssertionError: the network is wrong.
    """
    repeated, layers = trace(task, task.networks[name])
    allowed = ROUNDING if max(task.rates) < HIGH_RATE else HIGH_ROUNDING
    if layers[0].candidates is None:
        allowed = LOOSE_ROUNDING
    found = Deviation(allowed=allowed)
    for layer in layers:
        compare_layer(layer, layer is layers[-1], found)
    found.verify()
    pairs = zip((result[0], *result[1]), (repeated[0], *repeated[1]), strict=True)
    for a, b in pairs:
        error = float((a - b).norm()) / max(float(b.norm()), 1e-30)
        assert error <= REPEATED, f"the step differs by {error:.3g} of its norm from another one"
    return found.about()


def trace(task: EventTask, network: EventNetwork) -> tuple[Step, list[LayerTrace]]:
    """Run a training step without update, and record what goes through the layers."""
    inputs: list[Any] = []
    outputs: list[Any] = []

    def note_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        (output.values if isinstance(output, Events) else output).retain_grad()
        outputs.append(output)

    hooks = [
        m.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
        for m in network.layers
    ]
    hooks += [m.register_forward_hook(note_output) for m in network.spiking()]
    try:
        result = network.train(task.labels, update=False)
    finally:
        for hook in hooks:
            hook.remove()
    shape = task.case.num_steps, task.case.batch, -1
    layers = []
    for i, (module, x, y) in enumerate(zip(network.layers, inputs, outputs, strict=True)):
        grad_inputs = carried = None
        if i:
            below, reached = outputs[i - 1], _listed(x, shape)
            own = _listed(below, shape)
            grad_inputs = _grad(below, shape)
            carried = torch.ones_like(grad_inputs).bool() if own is None else own & reached
        spikes, candidates = _dense(y, shape), _listed(y, shape)
        layers.append(
            LayerTrace(module, _dense(x, shape), grad_inputs, carried, spikes, candidates,
                       _grad(y, shape))
        )  # fmt: skip
    return result, layers


def _dense(x: Events | Tensor, shape: tuple[int, int, int]) -> Tensor:
    found = x.to_dense() if isinstance(x, Events) else x
    return found.detach().reshape(shape)


def _grad(x: Events | Tensor, shape: tuple[int, int, int]) -> Tensor:
    if isinstance(x, Tensor):
        return x.grad.reshape(shape)
    return replace(x, values=x.values.grad).to_dense()


def _listed(x: Events | Tensor, shape: tuple[int, int, int]) -> Tensor | None:
    """Return the sites in a list of events; None for a dense tensor."""
    if isinstance(x, Tensor):
        return None
    return replace(x, values=torch.ones(len(x.indices), device=x.device)).to_dense() > 0


def compare_layer(layer: LayerTrace, is_last: bool, found: Deviation) -> None:
    (weight, grad_weight), (bias, grad_bias) = layer.parameters()
    inputs, wide = layer.inputs.double(), weight.double()
    y, grad = inputs @ wide + bias.double(), layer.grad.double()
    if is_last:
        found.add("outputs", layer.outputs, y)
    else:
        grad = _current_gradient(y, grad, layer, found)
    expected = inputs.flatten(0, 1).t() @ grad.flatten(0, 1)
    found.add("gradient of weights", grad_weight, expected)
    found.add("gradient of biases", grad_bias, grad.sum((0, 1)))
    if layer.grad_inputs is not None and layer.carried is not None:
        expected = (grad @ wide.t())[layer.carried]
        found.add("gradient of spikes", layer.grad_inputs[layer.carried], expected)


def _current_gradient(y: Tensor, grad: Tensor, layer: LayerTrace, found: Deviation) -> Tensor:
    """Compare the spikes and return the gradient of the currents; see docs/events.md."""
    fired, u = layer.outputs > 0, torch.empty_like(y)
    v = torch.zeros_like(y[0])
    for t in range(len(y)):
        h = DECAY * v + y[t]
        u[t], v = h - THRESHOLD, torch.where(fired[t], 0.0, h)
    flipped = (u >= 0) != fired
    found.sites += u.numel()
    found.flips += int(flipped.sum())
    margins = [u[flipped].abs()]
    candidates = u >= CUTOFF
    if layer.candidates is not None:
        other = candidates != layer.candidates
        found.candidates += int(other.sum())
        margins.append((u[other] - CUTOFF).abs())
        candidates = layer.candidates
    found.margin = max(found.margin, *(float(m.max()) for m in margins if len(m)), 0.0)
    direct = torch.where(candidates, grad / (WIDTH * u.abs() + 1).square(), 0.0)
    back = torch.zeros_like(v)
    for t in reversed(range(len(y))):
        back = direct[t] + DECAY * torch.where(fired[t], 0.0, back)
        direct[t] = back
    return direct
