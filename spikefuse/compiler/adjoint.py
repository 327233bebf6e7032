"""The reverse of a step: gradients of its inputs from gradients of its results."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from spikefuse.compiler.graph import Graph
from spikefuse.compiler.simplify import contracted
from spikefuse.compiler.trace import (
    Step,
    capture,
    identifiers,
    step_function,
)
from spikefuse.neurons.definition import Definition
from spikefuse.neurons.surrogate import Surrogate


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
        """What yields the gradients of these inputs and of all states, and adds those of these
        parameters to `g<parameter>`, the sums so far."""
        num_inputs, num_states = len(step.inputs), len(step.states)
        chosen = [self.inputs.index(name) for name in inputs]
        chosen += range(num_inputs, num_inputs + num_states)
        chosen += [num_inputs + num_states + self.params.index(name) for name in params]
        gradients = (*(f"g{y}" for y in step.outputs), *identifiers("gv", step.states))
        names = dict(zip(step.params, step.graph.inputs[num_inputs + num_states :], strict=True))
        sums = tuple(f"g{names[name]}" for name in params)
        graph = replace(self.graph, inputs=(*step.graph.inputs, *gradients, *sums))
        graph = contracted(graph.accumulate([self.graph.outputs[i] for i in chosen], sums))
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


def _gradients(total: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """As `torch.autograd.grad`, which would suspend capture's modes while derivatives run, and
    import a symbolic algebra to be given several gradients."""
    engine = torch.autograd.Variable._execution_engine
    found: Sequence[Tensor | None] = engine.run_backward(
        (total,),
        (torch.ones_like(total),),
        False,  # keep_graph
        False,  # create_graph
        tuple(leaves),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return found


def reverse_step(
    definition: Definition, step: Step, learned: Collection[str] | None = None
) -> Reverse:
    """Differentiate `step` with autograd and trace the result.

    Args:
        learned: the parameters that may require a gradient; all of them by default.

    Raises:
        UnsupportedOperation: the derivative is not made of operations that kernels have.
    """
    function = step_function(definition, step.params)
    num_variables = len(step.inputs) + len(step.states)
    num_all = num_variables + len(step.params)
    learnable = [
        i
        for i, name in enumerate(step.params)
        if (learned is None or name in learned) and has_gradient(definition, name)
    ]

    def vjp(*args: Tensor) -> tuple[Tensor, ...]:
        values = list(args[:num_all])
        wanted = [*range(num_variables), *(num_variables + i for i in learnable)]
        for i in wanted:
            values[i] = values[i].detach().requires_grad_()
        outputs, states = function(*values)
        pairs = zip((*outputs, *states), args[num_all:], strict=True)
        products = [y * gradient for y, gradient in pairs if y.requires_grad]
        leaves, zero = [values[i] for i in wanted], torch.zeros((), dtype=torch.float32)
        if not products:  # nothing that was computed depends on a variable
            return tuple(zero for _ in leaves)
        found = _gradients(sum(products[1:], products[0]), leaves)
        return tuple(zero if g is None else g for g in found)

    names = (
        *step.graph.inputs,
        *(f"g{y}" for y in step.outputs),
        *identifiers("gv", step.states),
    )
    params = tuple(step.params[i] for i in learnable)
    return Reverse(step.inputs, params, capture(vjp, names, step.name, gradients=True))
