"""The reverse of a step: gradients of its inputs given the gradients of its results."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from spikefuse._torch import gradients
from spikefuse.compiler.graph import Graph
from spikefuse.compiler.simplify import contracted
from spikefuse.compiler.trace import Step, capture, step_function
from spikefuse.neurons.definition import Neuron
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
        names, first = step.gradients, len(step.inputs)
        states = names[step.num_outputs :]
        present = {n for n, is_missing in zip(names, missing, strict=False) if not is_missing}
        reads = [self.graph.select([o]).used() for o in self.graph.outputs[first:][: len(states)]]
        # The gradient of a state goes to the step before.
        while new := {n for n, r in zip(states, reads, strict=True) if r & present} - present:
            present |= new
        return tuple(name for name in names if name not in present)

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
        graph = replace(graph, inputs=(*step.graph.inputs, *step.gradients, *sums))
        graph = contracted(graph.accumulate(outputs, sums))
        return Reverse(tuple(inputs), tuple(params), graph)


def has_gradient(definition: Neuron, name: str) -> bool:
    """Return whether a run-time value may be learned, which surrogates decide for theirs."""
    owner: nn.Module = definition
    while "." in name:
        child, name = name.split(".", 1)
        owner = owner.get_submodule(child)
        if isinstance(owner, Surrogate):
            return owner.learns(name)
    return True


def _transient(leaves: Sequence[Tensor], results: Sequence[Tensor], step: Step) -> list[int]:
    """Return the indices of new states whose gradient is that of a final state, or none.

    No later step passes a gradient to them: neither an output depends on them, nor a state that
    receives gradients itself. In an eager loop, autograd does not follow such states.
    """
    states = leaves[len(step.inputs) : len(step.inputs) + len(step.states)]
    if not states:
        return []
    reads = {
        i: [g is not None for g in gradients(result, states, True)]
        for i, result in enumerate(results)
        if result.requires_grad
    }
    found: list[int] = []
    while True:
        transient, found = found, []
        for i, state in enumerate(range(step.num_outputs, len(results))):
            read = any(row[i] for result, row in reads.items() if result not in transient)
            if state in reads and not read:
                found.append(state)
        if found == transient:
            return found


def reverse_step(definition: Neuron, step: Step, learned: Collection[str] | None = None) -> Reverse:
    """Differentiate `step` with autograd and trace the result.

    Args:
        learned: the parameters that may require a gradient; all by default.

    Raises:
        UnsupportedOperation: the derivative uses an operation that kernels do not support.
    """
    function = step_function(definition, step.params)
    candidates = step.params if learned is None else [n for n in step.params if n in learned]
    params = tuple(name for name in candidates if has_gradient(definition, name))
    split, num = len(step.inputs) + len(step.states), len(step.graph.inputs)
    wanted = [*range(split), *(split + step.params.index(name) for name in params)]

    def run(args: Sequence[Tensor]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Return the variables as leaves, and the results of the step."""
        values = list(args)
        for i in wanted:
            values[i] = values[i].detach().requires_grad_()
        return [values[i] for i in wanted], function(*values)

    def vjp(*args: Tensor) -> tuple[Tensor, ...]:
        transient = _transient(*run(args[:num]), step)
        leaves, results = run(args[:num])
        pairs = [*zip(results, args[num:], strict=True)]
        lasting = [y * g for i, (y, g) in enumerate(pairs) if i not in transient]
        products = [product for product in lasting if product.requires_grad]
        totals = [torch.zeros((), dtype=torch.float32)] * len(leaves)
        if products:
            found = gradients(sum(products[1:], products[0]), leaves, bool(transient))
            totals = [z if g is None else g for z, g in zip(totals, found, strict=True)]
        for y, gradient in (pairs[i] for i in transient):
            # Where there is no gradient, its product with an infinite derivative must not be NaN.
            found = gradients(y * gradient, leaves, True)
            for i, g in enumerate(found):
                if g is not None:
                    totals[i] = totals[i] + torch.where(gradient != 0, g, 0.0)
        return tuple(totals)

    variables = *step.graph.inputs, *step.gradients
    return Reverse(step.inputs, params, capture(vjp, variables, step.name, gradients=True))
