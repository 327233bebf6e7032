"""The reverse of a step: gradients of its inputs given the gradients of its results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import compress

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

    Attributes:
        paths: for each result of the step, the variables that autograd follows it back to.
    """

    inputs: tuple[str, ...]
    params: tuple[str, ...]
    graph: Graph
    paths: tuple[frozenset[str], ...] = ()

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


def _paths(
    function: Callable[..., tuple[Tensor, ...]], names: Sequence[str], wanted: Sequence[int]
) -> tuple[frozenset[str], ...]:
    """Return for each result of a step the `wanted` variables that autograd follows it back to."""
    found: list[list[bool]] = []
    for i in wanted:
        leaves = [torch.full((), 0.5, dtype=torch.float32, device="cpu") for _ in names]
        leaves[i].requires_grad_()
        found.append([result.requires_grad for result in function(*leaves)])
    columns = zip(*found, strict=True)
    return tuple(frozenset(names[i] for i in compress(wanted, column)) for column in columns)


def _transient(paths: Sequence[frozenset[str]], step: Step) -> list[int]:
    """Return the indices of new states whose gradient is that of a final state, or none.

    No later step passes a gradient to them: neither an output depends on them, nor a state that
    receives gradients itself. In an eager loop, autograd does not follow such states.
    """
    first = len(step.inputs)
    states = [*enumerate(step.graph.inputs[first : first + len(step.states)], step.num_outputs)]
    found: list[int] = []
    while True:
        read = frozenset().union(*(path for i, path in enumerate(paths) if i not in found))
        transient = [i for i, name in states if paths[i] and name not in read]
        if transient == found:
            return found
        found = transient


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
    paths = _paths(function, step.graph.inputs, wanted)
    transient = _transient(paths, step)

    def vjp(*args: Tensor) -> tuple[Tensor, ...]:
        values = list(args[:num])
        for i in wanted:
            values[i] = values[i].detach().requires_grad_()
        leaves, results = [values[i] for i in wanted], function(*values)
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
    graph = capture(vjp, variables, step.name, gradients=True)
    return Reverse(step.inputs, params, graph, paths)
