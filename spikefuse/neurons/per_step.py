"""Parameters with a value per time step, which become inputs of the step."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from spikefuse.neurons.definition import Neuron, State, cached_class, call_step
from spikefuse.neurons.description import bind


def per_step_values(values: dict[str, Any], x: Tensor) -> dict[str, Tensor]:
    """Return the values that broadcast over all dims of the input `[T, B, ...]`, by name.

    Raises:
        ValueError: they do not broadcast, or have another number of steps.
    """
    found = {n: v for n, v in values.items() if isinstance(v, Tensor) and v.ndim == x.ndim}
    for name, value in found.items():
        expected = [len(x), 1, *x.shape[2:]]
        pairs = zip(value.shape[1:], expected[1:], strict=True)
        if value.shape[0] not in (1, len(x)) or not all(n in (1, m) for n, m in pairs):
            raise ValueError(
                f"parameter '{name}' has shape {list(value.shape)}: with as many dims as the "
                f"input, it has a value per step, and must broadcast to {expected}"
            )
    return found


class PerStep(Neuron):
    """A neuron whose parameters `names` are further inputs; made by `with_inputs`."""

    neuron: Neuron
    names: tuple[str, ...]

    def step_of_neuron(self, *args: Tensor) -> Any:
        num, split = len(self.neuron.input_names), len(self.input_names)
        values = dict(zip(self.names, args[num:split], strict=True))
        neuron = bind(self.neuron, values)
        if "_exposed" in vars(self):
            vars(neuron)["_exposed"] = vars(self)["_exposed"]
        return call_step(neuron, args[:num], args[split:])


def with_inputs(neuron: Neuron, values: dict[str, Any], names: tuple[str, ...]) -> PerStep:
    """Return `neuron` with further inputs, the values `names`. The definition is made once, and has
    the other values of the last call.

    Args:
        values: the run-time values of the neuron.
    """
    cache, key = neuron.description().cache, ("with inputs", names)
    others = {**values, **dict.fromkeys(names, 0.0)}
    definition: PerStep | None = cache.get(key)
    if definition is None:
        inputs = *neuron.input_names, *(f"value{i}" for i in range(len(names)))
        definition = cache[key] = around(PerStep, type(neuron), inputs)()
        definition.neuron, definition.names = bind(neuron, others), names
    for name, value in others.items():
        prefix, _, attribute = name.rpartition(".")
        vars(definition.neuron.get_submodule(prefix))[attribute] = value
    return definition


@cached_class
def around(base: type[Any], kind: type[Neuron], inputs: tuple[str, ...]) -> Any:
    """Return `base` with these inputs, and the states of the neuron that is its attribute
    `neuron`."""

    def step(self: Any, *args: Tensor) -> Any:
        return self.step_of_neuron(*args)

    names = ("self", *inputs, *kind.states)
    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
    setattr(step, "__signature__", inspect.Signature(parameters))  # noqa: B010
    firsts = {name: state.initial for name, state in kind.states.items()}
    states = {n: State(f"neuron.{x}" if isinstance(x, str) else x) for n, x in firsts.items()}
    return type(f"{kind.__name__}{base.__name__}", (base,), {**states, "step": step})
