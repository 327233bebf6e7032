"""The variables of a kernel, shared by all emitters."""

from __future__ import annotations

from collections.abc import Sequence

from spikefuse.compiler.adjoint import Reverse
from spikefuse.compiler.trace import Step

KERNELS = "forward", "backward"


class Variables:
    """Variable names by role: inputs `xs`, states `vs`, outputs `ys`, and their gradients.

    Args:
        channel_params: parameters with one value per channel, read from memory.
        tensor_params: parameters with a single value in memory; the others are floats.
    """

    def __init__(
        self,
        step: Step,
        reverse: Reverse,
        channel_params: Sequence[str],
        tensor_params: Sequence[str],
    ) -> None:
        self.step, self.reverse = step, reverse.graph
        names, split = step.graph.inputs, len(step.inputs)
        self.xs, self.ys = names[:split], step.outputs
        self.vs = names[split : split + len(step.states)]
        identifiers = dict(zip(step.params, names[split + len(self.vs) :], strict=True))
        #: Identifiers of all parameters, of those with one value per channel, of those with one
        #: value in memory, and of those that are arguments themselves.
        self.params = [*identifiers.values()]
        self.channel = [identifiers[name] for name in channel_params]
        self.tensors = [identifiers[name] for name in tensor_params]
        self.floats = [p for p in self.params if p not in (*self.channel, *self.tensors)]
        inputs = dict(zip(step.inputs, self.xs, strict=True))
        self.gxs = [f"g{inputs[name]}" for name in reverse.inputs]
        self.gys, self.gvs = [f"g{y}" for y in self.ys], [f"g{v}" for v in self.vs]
        #: Gradients of parameters.
        self.grads = [f"g{identifiers[name]}" for name in reverse.params]
        #: The graph that computes the new states only.
        self.advance = step.graph.select(step.graph.outputs[len(self.ys) :])

    def each_state(self, *lines: str) -> list[str]:
        """Emit lines for each state: `{v}`, its gradient `{g}` and its value `{rest}` at rest."""
        states = zip(self.vs, self.gvs, self.step.initial, strict=True)
        return [line.format(v=v, g=g, rest=rest) for v, g, rest in states for line in lines]

    def source(self, kernels: Sequence[str] = KERNELS) -> str:
        """Return a module with these kernels."""
        raise NotImplementedError


def indent(lines: Sequence[str], depth: int) -> list[str]:
    return ["    " * depth + line for line in lines]
