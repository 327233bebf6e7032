"""The variables of a kernel, shared by both emitters."""

from __future__ import annotations

from collections.abc import Sequence

from spikefuse.compiler.adjoint import Reverse
from spikefuse.compiler.trace import Step


class Variables:
    """Variable names by role: inputs `xs`, states `vs`, outputs `ys`, and their gradients."""

    def __init__(self, step: Step, reverse: Reverse, channel_params: Sequence[str]) -> None:
        self.step, self.reverse = step, reverse.graph
        names, split = step.graph.inputs, len(step.inputs)
        self.xs, self.ys = names[:split], step.outputs
        self.vs = names[split : split + len(step.states)]
        #: The states with their values at rest.
        self.initial = list(zip(self.vs, step.initial, strict=True))
        #: Identifiers of the parameters by their names.
        self.params = dict(zip(step.params, names[split + len(self.vs) :], strict=True))
        #: Identifiers of the parameters with one value per channel.
        self.channel = [self.params[name] for name in channel_params]
        inputs = dict(zip(step.inputs, self.xs, strict=True))
        self.gxs = [f"g{inputs[name]}" for name in reverse.inputs]
        self.gys, self.gvs = [f"g{y}" for y in self.ys], [f"g{v}" for v in self.vs]
        #: Gradients of parameters.
        self.grads = [f"g{self.params[name]}" for name in reverse.params]
        #: The graph that computes the new states only.
        self.advance = step.graph.select(step.graph.outputs[len(self.ys) :])


def indent(lines: Sequence[str], depth: int) -> list[str]:
    return ["    " * depth + line for line in lines]
