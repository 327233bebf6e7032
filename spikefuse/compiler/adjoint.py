"""The reverse of a step: gradients of its inputs given the gradients of its results."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from spikefuse.compiler.graph import Graph
from spikefuse.compiler.simplify import contracted
from spikefuse.compiler.trace import Step, capture, identifiers, step_function
from spikefuse.neurons.definition import Definition
from spikefuse.neurons.surrogate import Surrogate


@dataclass(frozen=True)
class Reverse:
    """The vector-Jacobian product of a step.

    The graph reads the step's variables and the gradients of its outputs (`gy0...`) and of its new
    states (`gv0_<state>...`). It computes the gradients of `inputs`, all states and `params`.
    """

    inputs: tuple[str, ...]
    params: tuple[str, ...]
    graph: Graph

    def absent(self, step: Step, missing: Sequence[bool]) -> tuple[str, ...]:
        """Return the variables of gradients that are absent at all steps.

        Args:
            missing: for each output, whether it has no gradient, then for each final state; none of
                the states has a gradient if these are left out.
        """
        outputs = tuple(f"g{y}" for y in step.outputs)
        states, first = identifiers("gv", step.states), len(step.inputs)
        known = zip((*outputs, *states), missing, strict=False)
        present = {name for name, is_missing in known if not is_missing}
        reads = [self.graph.select([o]).used() for o in self.graph.outputs[first:][: len(states)]]
        # The gradient of a state goes to the step before.
        while new := {n for n, r in zip(states, reads, strict=True) if r & present} - present:
            present |= new
        return tuple(name for name in (*outputs, *states) if name not in present)

    def select(
        self,
        step: Step,
        inputs: Sequence[str],
        params: Sequence[str],
        absent: Sequence[str] = (),
    ) -> Reverse:
        """Return the reverse that computes the gradients of `inputs` and of all states, without
        the terms of `absent` gradients.

        It adds the gradients of `params` to further variables `g<parameter>`, the running sums.
        """
        first, split = len(step.inputs), len(step.inputs) + len(step.states)
        sums = tuple(f"g{step.graph.inputs[split + step.params.index(name)]}" for name in params)
        graph = self.graph.without(absent) if absent else self.graph
        outputs = [graph.outputs[self.inputs.index(name)] for name in inputs]
        outputs += graph.outputs[first:split]
        outputs += [graph.outputs[split + self.params.index(name)] for name in params]
        graph = replace(graph, inputs=(*_variables(step), *sums))
        graph = contracted(graph.accumulate(outputs, sums))
        return Reverse(tuple(inputs), tuple(params), graph)


def _variables(step: Step) -> tuple[str, ...]:
    outputs = (f"g{y}" for y in step.outputs)
    return (*step.graph.inputs, *outputs, *identifiers("gv", step.states))


def has_gradient(definition: Definition, name: str) -> bool:
    """Return whether a run-time value may be learned, which surrogates decide for theirs."""
    owner: nn.Module = definition
    while "." in name:
        child, name = name.split(".", 1)
        owner = owner.get_submodule(child)
        if isinstance(owner, Surrogate):
            return owner.learns(name)
    return True


def _gradients(total: Tensor, leaves: Sequence[Tensor], retain: bool) -> Sequence[Tensor | None]:
    """Compute what `torch.autograd.grad` does.

    `torch.autograd.grad` would disable the modes of `capture`, and import SymPy.
    """
    found: Sequence[Tensor | None] = torch.autograd.Variable._execution_engine.run_backward(
        (total,),
        (torch.ones_like(total),),
        retain,  # keep_graph
        False,  # create_graph
        tuple(leaves),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return found


def _transient(leaves: Sequence[Tensor], results: Sequence[Tensor], step: Step) -> list[int]:
    """Return the indices of new states whose gradient is that of a final state, or none.

    No later step passes a gradient to them: neither an output depends on them, nor a state that
    receives gradients itself. In an eager loop, autograd does not follow such states.
    """
    states = leaves[len(step.inputs) : len(step.inputs) + len(step.states)]
    if not states:
        return []
    reads = [
        [g is not None for g in _gradients(result, states, True)] if result.requires_grad else []
        for result in results
    ]
    transient: list[int] = []
    while True:
        others = [row for i, row in enumerate(reads) if i not in transient and row]
        found = [
            step.num_outputs + i
            for i in range(len(states))
            if not any(row[i] for row in others) and results[step.num_outputs + i].requires_grad
        ]
        if found == transient:
            return found
        transient = found


def reverse_step(
    definition: Definition, step: Step, learned: Collection[str] | None = None
) -> Reverse:
    """Differentiate `step` with autograd and trace the result.

    Args:
        learned: the parameters that may require a gradient; all by default.

    Raises:
        UnsupportedOperation: the derivative uses an operation that kernels do not support.
    """
    function = step_function(definition, step.params)
    num_variables = len(step.inputs) + len(step.states)
    num_all = num_variables + len(step.params)
    learnable = [
        i
        for i, name in enumerate(step.params)
        if (learned is None or name in learned) and has_gradient(definition, name)
    ]

    wanted = [*range(num_variables), *(num_variables + i for i in learnable)]

    def run(args: Sequence[Tensor]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Return the variables as leaves, and the results of the step."""
        values = list(args)
        for i in wanted:
            values[i] = values[i].detach().requires_grad_()
        return [values[i] for i in wanted], function(*values)

    def vjp(*args: Tensor) -> tuple[Tensor, ...]:
        transient = _transient(*run(args[:num_all]), step)
        leaves, results = run(args[:num_all])
        pairs = [*zip(results, args[num_all:], strict=True)]
        lasting = [y * g for i, (y, g) in enumerate(pairs) if i not in transient]
        products = [product for product in lasting if product.requires_grad]
        totals = [torch.zeros((), dtype=torch.float32)] * len(leaves)
        if products:
            found = _gradients(sum(products[1:], products[0]), leaves, bool(transient))
            totals = [z if g is None else g for z, g in zip(totals, found, strict=True)]
        for y, gradient in (pairs[i] for i in transient):
            # Where there is no gradient, its product with an infinite derivative must not be NaN.
            found = _gradients(y * gradient, leaves, True)
            for i, g in enumerate(found):
                if g is not None:
                    totals[i] = totals[i] + torch.where(gradient != 0, g, 0.0)
        return tuple(totals)

    params = tuple(step.params[i] for i in learnable)
    return Reverse(step.inputs, params, capture(vjp, _variables(step), step.name, gradients=True))
