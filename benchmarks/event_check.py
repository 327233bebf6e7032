"""Whether a training step of a network of LIF neurons, on events or dense, is right.

Rounding decides now and then whether a neuron fires, and from then on its sample goes another way,
so two right networks may have little in common. Each layer is held to float64 by itself instead, on
the spikes that it really got, and on the gradient of its own spikes that really came back: what it
computes from these is compared, spikes, gradients of weights and biases, and of the layer below it.
In the float64 layer a neuron is reset where that of the network fired.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.event_networks import CUTOFF, DECAY, LOOP, THRESHOLD, WIDTH, Network, Work
from spikefuse.nn import Events

# A potential is a sum of some hundred float32 numbers of about 1, whose decay forgets the errors of
# 20 steps: it may be off by so much. Only nearer to the threshold may a spike differ, and with it
# at most so many of all sites, whose potentials lie within a few units.
NEAR, FLIPS = 1e-5, 1e-5
# The slope of the surrogate changes by up to 2 WIDTH = 20 times the error of a potential, which is
# about 1e-6 at low activity: gradients then differ by about 1e-6 of their norm. Where weights are
# scaled up until a fifth of the neurons fires, potentials are sums of much greater numbers, and the
# dense network differs from float64 by as much as that on events: 1.7e-4 has been seen of both.
ROUNDING, ROUNDING_HIGH, HIGH = 1e-4, 5e-4, 0.1
# The compiled loop, whose layers hand on given spikes: at a handful of sites near threshold and
# cutoff rounding still resets another neuron, or adds a term to gradients of tens of thousands.
LOOP_ROUNDING = 3e-2
# Of networks that do not tell their candidates, those so near to the cutoff get no gradient while
# they are checked.
CLOSE = 3e-6
# Two steps from the same weights: matrix products need not add in the same order.
REPEATED = 1e-3


@dataclass
class Layer:
    """What went through a layer in a training step: `module`, with `[I, O]` weights.

    Args:
        inputs: spikes `[T, B, I]`.
        grad_inputs, carried: the gradient of the spikes of the layer below, and where it has one;
            None of the first layer.
        outputs: spikes `[T, B, O]`; of the last layer currents.
        candidates: which of the spikes carry a gradient; None if that is not told.
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
        """(value, gradient) of the weights `[I, O]` and of the bias."""
        found = []
        for p in (self.module.weight, self.module.bias):
            assert isinstance(p, Tensor)
            assert p.grad is not None
            pair = p.detach(), p.grad.to_dense() if p.grad.is_sparse else p.grad
            turned = isinstance(self.module, nn.Linear) and p.ndim == 2
            found.append((pair[0].t(), pair[1].t()) if turned else pair)
        return found


@dataclass
class Found:
    """How far a network is from float64, layer by layer on the same inputs.

    Attributes:
        flips: spikes that differ, of `sites`; `candidates` that do where they are told.
        margin: the potential, from the threshold or cutoff, of the clearest of these.
        errors: of gradients, relative to their norm, the greatest by kind.
    """

    sites: int = 0
    flips: int = 0
    candidates: int = 0
    margin: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)
    rounding: float = ROUNDING

    def add(self, what: str, found: Tensor, expected: Tensor) -> None:
        size = float(expected.norm())
        error = float((found.double() - expected).norm()) / max(size, 1e-30)
        self.errors[what] = max(error, self.errors.get(what, 0.0))

    def about(self) -> dict[str, Any]:
        errors = {what: float(f"{error:.3g}") for what, error in self.errors.items()}
        return {
            "sites": self.sites,
            "flips": self.flips,
            "candidate_flips": self.candidates,
            "margin": float(f"{self.margin:.3g}"),
            "errors": errors,
        }

    def judge(self) -> None:
        """
        Raises:
            AssertionError: the network is wrong.
        """
        turned = self.flips + self.candidates
        assert self.margin <= NEAR, f"a spike differs {self.margin:.3g} from its threshold"
        assert turned <= 2 + FLIPS * self.sites, f"{turned} of {self.sites} spikes differ"
        for what, error in self.errors.items():
            assert error <= self.rounding, f"{what} differs by {error:.3g} of its norm"


def traced(
    network: Network, work: Work, masks: Sequence[Tensor] = ()
) -> tuple[tuple[Tensor, list[Tensor]], list[Layer]]:
    """A training step without update, and what went through its layers.

    Args:
        masks: of each hidden layer, sites whose spikes are to carry no gradient.
    """
    inputs: list[Any] = []
    outputs: list[Any] = []

    def keep_input(module: nn.Module, args: tuple[Any, ...]) -> None:
        inputs.append(args[0])

    def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        values = output.values if isinstance(output, Events) else output
        if len(outputs) < len(masks):
            mask = masks[len(outputs)].view_as(values)
            values.register_hook(lambda grad: grad.masked_fill(mask, 0.0))
        values.retain_grad()
        outputs.append(output)

    hooks = [m.register_forward_pre_hook(keep_input) for m in network.layers]
    hooks += [m.register_forward_hook(keep) for m in network.firing()]
    try:
        result = network.train(work.labels, update=False)
    finally:
        for hook in hooks:
            hook.remove()
    shape = work.case.num_steps, work.case.batch, -1
    layers = []
    for i, (module, x, y) in enumerate(zip(network.layers, inputs, outputs, strict=True)):
        grad_inputs = carried = None
        if i:
            below, reached = outputs[i - 1], _listed(x, shape)
            own = _listed(below, shape)
            grad_inputs = _grad(below, shape)
            carried = torch.ones_like(grad_inputs).bool() if own is None else own & reached
            if masks:
                carried &= ~masks[i - 1]
        layers.append(
            Layer(module, _dense(x, shape), grad_inputs, carried,
                  _dense(y, shape), _listed(y, shape), _grad(y, shape))
        )  # fmt: skip
    return result, layers


def _dense(x: Events | Tensor, shape: tuple[int, int, int]) -> Tensor:
    found = x.to_dense() if isinstance(x, Events) else x
    return found.detach().reshape(shape)


def _grad(x: Events | Tensor, shape: tuple[int, int, int]) -> Tensor:
    if isinstance(x, Tensor):
        assert x.grad is not None
        return x.grad.reshape(shape)
    assert x.values is not None
    return replace(x, values=x.values.grad).to_dense()


def _listed(x: Events | Tensor, shape: tuple[int, int, int]) -> Tensor | None:
    """The sites that a list has, if it is one."""
    if isinstance(x, Tensor):
        return None
    return replace(x, values=torch.ones(len(x.indices), device=x.device)).to_dense() > 0


def compared(layer: Layer, last: bool, found: Found) -> Tensor:
    """Add to `found` how far a layer is from float64; the sites of a layer that does not tell its
    candidates at which rounding decides whether there is one."""
    (weight, grad_weight), (bias, grad_bias) = layer.parameters()
    inputs, wide = layer.inputs.double(), weight.double()
    y, grad = inputs @ wide + bias.double(), layer.grad.double()
    undecided = torch.zeros_like(layer.outputs, dtype=torch.bool)
    if last:
        found.add("outputs", layer.outputs, y)
    else:
        grad, undecided = _scanned(y, grad, layer, found)
    expected = inputs.flatten(0, 1).t() @ grad.flatten(0, 1)
    found.add("gradient of weights", grad_weight, expected)
    found.add("gradient of biases", grad_bias, grad.sum((0, 1)))
    if layer.grad_inputs is not None and layer.carried is not None:
        expected = (grad @ wide.t())[layer.carried]
        found.add("gradient of spikes", layer.grad_inputs[layer.carried], expected)
    return undecided


def _scanned(y: Tensor, grad: Tensor, layer: Layer, found: Found) -> tuple[Tensor, Tensor]:
    """The gradient of currents, and the undecided sites; docs/events.md has the equations."""
    fired, u = layer.outputs > 0, torch.empty_like(y)
    v = torch.zeros_like(y[0])
    for t in range(len(y)):
        h = DECAY * v + y[t]
        u[t], v = h - THRESHOLD, torch.where(fired[t], 0.0, h)
    near = (u - CUTOFF).abs() < CLOSE
    candidates = layer.candidates
    turned = (u >= 0) != fired
    found.sites += u.numel()
    found.flips += int(turned.sum())
    margins = [u[turned].abs()]
    if candidates is None:
        candidates = u >= CUTOFF
    else:
        other = (u >= CUTOFF) != candidates
        found.candidates += int(other.sum())
        margins.append((u[other] - CUTOFF).abs())
        near = torch.zeros_like(near)
    found.margin = max(found.margin, *(float(m.max()) for m in margins if len(m)), 0.0)
    direct = torch.where(candidates, grad / (WIDTH * u.abs() + 1).square(), 0.0)
    back = torch.zeros_like(v)
    for t in reversed(range(len(y))):
        back = direct[t] + DECAY * torch.where(fired[t], 0.0, back)
        direct[t] = back
    return direct, near & (grad != 0)


def check(work: Work, name: str) -> tuple[tuple[Tensor, list[Tensor]], Found]:
    """A step of a network, and how far its layers are from float64."""
    network = work.networks[name]
    result, layers = traced(network, work)
    allowed = ROUNDING if work.rate < HIGH else ROUNDING_HIGH
    found = Found(rounding=allowed)
    masks = [compared(layer, layer is layers[-1], found) for layer in layers][:-1]
    if any(bool(mask.any()) for mask in masks):
        # Once more, with nothing to decide.
        found = Found(rounding=allowed)
        for layer in traced(network, work, masks)[1]:
            compared(layer, layer.module is network.layers[-1], found)
    return result, found


def check_loop(work: Work, like: str) -> tuple[tuple[Tensor, list[Tensor]], Found]:
    """A step of the compiled loop; with the spikes of the network `like`, against its gradients."""
    network, other = work.networks[LOOP], work.networks[like]
    (logits, grads), layers = traced(other, work)
    given, natural = [layer.inputs for layer in layers[1:]], network.call
    expected = [logits.detach(), *(g.clone() for g in grads)]
    network.call = functools.partial(natural, given=given)
    try:
        logits, grads = network.train(work.labels, update=False)
    finally:
        network.call = natural
    found = Found(rounding=LOOP_ROUNDING)
    found.add("logits", logits.detach(), expected[0])
    for a, b in zip(grads, expected[1:], strict=True):
        found.add("gradients", a, b)
    return network.train(work.labels, update=False), found


def same(result: tuple[Tensor, list[Tensor]], again: tuple[Tensor, list[Tensor]]) -> None:
    """
    Raises:
        AssertionError: two steps of a network, which does the same in each, differ.
    """
    pairs = zip((result[0].detach(), *result[1]), (again[0].detach(), *again[1]), strict=True)
    for a, b in pairs:
        error = float((a - b).norm()) / max(float(b.norm()), 1e-30)
        assert error <= REPEATED, f"the step differs by {error:.3g} of its norm from another"
