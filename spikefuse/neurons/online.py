"""Definitions with the derivatives of a learning rule that goes forward in time.

A rule leaves the values of a step as they are and changes its derivatives: which dependences of
the new states on the earlier ones it follows, and that the layers below get only the gradient of
the same time step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from spikefuse._torch import children_of
from spikefuse.neurons.definition import Neuron, call_step, with_outputs
from spikefuse.neurons.description import bind
from spikefuse.neurons.per_step import around
from spikefuse.neurons.surrogate import Surrogate

#: Names the first input among the outputs of an `OnlineNeuron`.
INPUT = "_input"


class OnlineNeuron(Neuron):
    """A neuron with the derivatives of a rule; made by `online_neuron`.

    Unless the rule is "sltt", it takes each input twice, with the same values. The first ones
    receive the gradient through the states, the second ones that of the same time step. No gradient
    of the second kind goes to parameters.
    """

    neuron: Neuron
    rule: str
    names: tuple[str, ...]

    def step_of_neuron(self, *args: Tensor) -> Any:
        num = len(type(self.neuron).input_names)
        inputs, states = args[:num], args[len(self.input_names) :]
        twins = args[num : len(self.input_names)]
        fixed = tuple(s.detach() for s in states)
        neuron = with_outputs(self.neuron, self.names)
        self.expose(**{INPUT: inputs[0]})
        if self.rule == "sltt":
            outputs, new = call_step(neuron, inputs, fixed)
            return outputs, tuple(s.detach() for s in new)
        outputs, new = call_step(neuron, inputs, states)
        if self.rule != "d-rtrl":
            change = {"ottt": _silence, "e-prop": _detach_reset}[self.rule]
            _, followed = call_step(_changed(neuron, change), inputs, states)
            new = tuple(map(with_gradient_of, new, followed))
        now = tuple(map(with_gradient_of, inputs, twins))
        instant, _ = call_step(_changed(neuron, _detach), now, fixed)
        pairs = zip(outputs, instant, strict=True)
        return tuple(with_gradient_of(y, y + z) for y, z in pairs), new


def online_neuron(neuron: Neuron, rule: str, names: tuple[str, ...] = ()) -> OnlineNeuron:
    """Return `neuron`, whose attributes it continues to read, with the derivatives of a rule.

    Args:
        rule: "sltt", "ottt", "e-prop" or "d-rtrl".
        names: of its outputs; see `with_outputs`.
    """
    cache, key = neuron.description().cache, ("online", rule, names)
    if key not in cache:
        twins = () if rule == "sltt" else tuple(f"{name}_now" for name in neuron.input_names)
        kind = around(OnlineNeuron, type(neuron), (*neuron.input_names, *twins))
        definition = cache[key] = kind()
        definition.neuron, definition.rule, definition.names = neuron, rule, names
    return cache[key]


class _Value(torch.autograd.Function):
    """The first tensor, with the gradient of the second one."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, carrier: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


def with_gradient_of(value: Tensor, carrier: Tensor) -> Tensor:
    """Return `value` with the gradient of `carrier`."""
    return _Value.apply(value.detach(), carrier)


class _Silent(Surrogate):
    """No spike, without a gradient."""

    def forward(self, u: Tensor) -> Tensor:
        return torch.zeros_like(u)


_SILENT = _Silent()


def _changed(bound: Neuron, change: Callable[[nn.Module], None]) -> Neuron:
    """Return a copy of a bound neuron after `change` of it and of each of its submodules."""
    copy = bind(bound, {})
    for module in copy.modules():
        change(module)
    return copy


def _detach(module: nn.Module) -> None:
    """Detach the parameters."""
    own = vars(module)
    own.update({name: x.detach() for name, x in own.items() if isinstance(x, Tensor)})


def _detach_reset(module: nn.Module) -> None:
    """Follow no reset."""
    if hasattr(module, "detach_reset"):
        vars(module)["detach_reset"] = True


def _silence(module: nn.Module) -> None:
    """Replace spikes by 0."""
    for name, child in children_of(module).items():
        if isinstance(child, Surrogate):
            nn.Module.add_module(module, name, _SILENT)
