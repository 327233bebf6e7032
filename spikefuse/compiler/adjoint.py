"""The reverse of a step: gradients of its inputs from gradients of its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from spikefuse.compiler.graph import Graph
from spikefuse.compiler.trace import (
    Checked,
    Step,
    capture,
    examples,
    identifiers,
    step_function,
)
from spikefuse.neurons.definition import Definition
from spikefuse.surrogate import Surrogate


@dataclass(frozen=True)
class Reverse:
    """The vector-Jacobian product of a step.

    The graph reads the step's variables, `gy0...` (gradients of the outputs) and `gv_<state>`
    (of the new states), and yields gradients of `inputs`, all states and `params`.
    """

    inputs: tuple[str, ...]
    params: tuple[str, ...]
    graph: Graph

    def select(self, step: Step, inputs: Sequence[str], params: Sequence[str]) -> Reverse:
        """What yields the gradients of these inputs, of all states and of these parameters."""
        num_inputs, num_states = len(step.inputs), len(step.states)
        chosen = [self.inputs.index(name) for name in inputs]
        chosen += range(num_inputs, num_inputs + num_states)
        chosen += [num_inputs + num_states + self.params.index(name) for name in params]
        graph = self.graph.select([self.graph.outputs[i] for i in chosen])
        gradients = (*(f"g{y}" for y in step.outputs), *identifiers("gv", step.states))
        graph = replace(graph, inputs=(*step.graph.inputs, *gradients))
        return Reverse(tuple(inputs), tuple(params), graph)


def has_gradient(definition: Definition, name: str) -> bool:
    """Whether a run-time value may be learned: all but those that only steer a surrogate."""
    owner: nn.Module = definition
    *path, _ = parts = name.split(".")
    for i, part in enumerate(path):
        owner = owner.get_submodule(part)
        if isinstance(owner, Surrogate):
            return owner.learns(".".join(parts[i + 1 :]))
    return True


def reverse_step(definition: Definition, step: Step) -> Reverse:
    """Differentiate `step` with torch.func.vjp and trace the result."""
    function = step_function(definition, step.params)
    num_variables = len(step.inputs) + len(step.states)
    num_all = num_variables + len(step.params)
    learnable = [i for i, name in enumerate(step.params) if has_gradient(definition, name)]

    def vjp(*args: Tensor) -> tuple[Tensor, ...]:
        params = list(args[num_variables:num_all])

        def primal(*differentiable: Tensor) -> tuple[Tensor, ...]:
            values = list(params)
            for i, value in zip(learnable, differentiable[num_variables:], strict=True):
                values[i] = value
            outputs, states = function(*differentiable[:num_variables], *values)
            return (*outputs, *states)

        variables = *args[:num_variables], *(params[i] for i in learnable)
        pullback = torch.func.vjp(primal, *variables)[1]
        return pullback(tuple(args[num_all:]))

    names = (
        *step.graph.inputs,
        *(f"g{y}" for y in step.outputs),
        *identifiers("gv", step.states),
    )
    with Checked(step.name, derivative=True):
        vjp(*examples(len(names)))
    params = tuple(step.params[i] for i in learnable)
    return Reverse(step.inputs, params, capture(vjp, names, gradients=True))
