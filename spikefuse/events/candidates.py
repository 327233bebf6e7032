"""Neurons that also report where their surrogate lets a gradient through."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor

from spikefuse.neurons.definition import Neuron, States, cached_class
from spikefuse.neurons.surrogate import Surrogate
from spikefuse.scan.program import traced

_D = TypeVar("_D", bound=Neuron)

#: What `_check_output` has found right, as the statics of definitions.
_checked: set[Hashable] = set()


def with_candidates(neuron: _D) -> _D:
    """Return a copy of `neuron`, sharing its parameters, that outputs marks `s + c`.

    `s` is the spike. `c` is 1 where the surrogate's argument reaches its cutoff, `u >= cutoff`, and
    carries no gradient. The mark is FIRED for a spike, NEAR for a candidate that did not fire and 0
    elsewhere. Its gradient is that of the spike.

    Raises:
        TypeError: `neuron` does not fire 0 or 1 through a single surrogate, or its output is not
            that spike.
        ValueError: the surrogate has no cutoff, or a positive one, which would miss spikes.
    """
    name, surrogate = type(neuron).__name__, getattr(neuron, "surrogate", None)
    if not isinstance(surrogate, Surrogate) or type(surrogate).spike is not Surrogate.spike:
        raise TypeError(
            f"{name} does not fire 0 or 1 through a single surrogate: use a neuron such as LIF"
        )
    cutoff = surrogate.cutoff
    if not isinstance(cutoff, float) or cutoff > 0:
        raise ValueError(
            f"the surrogate of {name} has cutoff {cutoff!r}: expected a float of at most 0, the "
            "distance from the threshold down to which gradients flow, such as "
            "FastSigmoid(10.0, cutoff=-0.1)"
        )
    description = neuron.description()
    if description.statics not in _checked:
        _check_output(neuron)
        _checked.add(description.statics)
    cache = description.cache  # valid until an attribute changes
    if "candidates" not in cache:
        cache["candidates"] = _copy(neuron, _candidate_class(type(neuron)))
    found: _D = cache["candidates"]
    return found


def _copy(neuron: Any, cls: Any) -> Any:
    copy = object.__new__(cls)
    copy.__dict__.update({k: v for k, v in neuron.__dict__.items() if k != "_description"})
    return copy


@cached_class
def _candidate_class(cls: Any) -> Any:
    """Return the subclass of `cls` whose output is `s + c`."""

    @functools.wraps(cls.step)
    def step(self: Any, *args: Tensor) -> tuple[Tensor, States]:
        surrogate = self.surrogate
        (s, states), (u,) = _step(self, cls, args, surrogate)
        return s + (u >= surrogate.cutoff).to(s.dtype), states

    return type(f"{cls.__name__}Candidates", (cls,), {"step": step})


def _step(
    neuron: Any, cls: Any, args: tuple[Tensor, ...], surrogate: Callable[[Tensor], Tensor]
) -> tuple[Any, list[Tensor]]:
    """The result of a step with another surrogate, and the arguments of that."""
    arguments: list[Tensor] = []

    def recorded(u: Tensor) -> Tensor:
        arguments.append(u)
        return surrogate(u)

    neuron.__dict__["surrogate"] = recorded  # shadows the submodule of that name
    try:
        return cls.step(neuron, *args), arguments
    finally:
        del neuron.__dict__["surrogate"]


def _check_output(neuron: Neuron) -> None:
    """Refuse a neuron whose output is not the spike of its one surrogate call, or 0 instead.

    Its step is traced with the spike as one more input, so that the graph shows its uses.
    """
    cls: Any = type(neuron)
    num_inputs, calls = len(cls.input_names), list[Tensor]()

    def step(self: Any, *args: Tensor) -> Any:
        spike, others = args[num_inputs], (*args[:num_inputs], *args[num_inputs + 1 :])
        result, arguments = _step(self, cls, others, lambda u: spike)
        calls[:] = arguments
        return result

    probe: Any = type(cls.__name__, (cls,), {"step": functools.wraps(cls.step)(step)})
    probe.input_names = (*cls.input_names, "spike")
    traced_step = traced(_copy(neuron, probe))
    graph, spike = traced_step.graph, traced_step.graph.inputs[num_inputs]
    made = {node.name: node for node in graph.nodes}

    def is_spike(operand: Any) -> bool:
        if operand == spike or operand not in made:
            return bool(operand == spike)
        op, operands = made[operand].op, made[operand].operands
        if op == "where":
            return all(x == 0.0 or is_spike(x) for x in operands[1:])
        if op != "mul":
            return False
        x, y = operands
        return (is_spike(x) and graph.is_binary(y)) or (is_spike(y) and graph.is_binary(x))

    if len(calls) == 1 and traced_step.num_outputs == 1 and is_spike(graph.outputs[0]):
        return
    fault = "does not return its spike as its only output"
    if len(calls) != 1:
        fault = f"calls its surrogate {len(calls)} times"
    raise TypeError(
        f"{cls.__name__}.step {fault}: an EventLinear needs a neuron with one spike output from "
        "one surrogate call; for others use nn.Linear and the neuron"
    )
