"""The scans of neurons in one call of a model, which can run once more on their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from spikefuse.block import block
from spikefuse.block.definition import Kind
from spikefuse.block.program import prepare_block
from spikefuse.kernels.norm import by_batch
from spikefuse.memory.policies import Policy
from spikefuse.neurons.definition import Neuron
from spikefuse.nn.call import Scan
from spikefuse.nn.neuron import scan_neuron
from spikefuse.scan.op import choose
from spikefuse.scan.records import Arguments, Wanted

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class NeuronScan:
    """One scan of a neuron, or of a block of norms and neuron.

    Attributes:
        name: the neuron's qualified name in the model.
        label: the types of the modules that ran, such as "BatchNorm2d + residual + LIF".
        tensors: what the scan reads: inputs `[T, B, ...]`, then others, such as initial states.
        num_inputs: how many of them are inputs.
        num_normalized: how many inputs are normalized by the statistics of the batch.
        run: computes the outputs from the tensors.
        program: the name of its kernels; None on the reference.
        memory: the policy in effect.
        reason: why it ran on the reference, or "".
        grad: whether gradients were enabled.
        parameters: what `run` reads beside the tensors.
        run_eagerly: computes the outputs as PyTorch alone would; None if that is unknown.
        modules: the norms and the neuron.
    """

    name: str
    label: str
    tensors: list[Tensor]
    num_inputs: int
    num_normalized: int
    run: Run
    program: str | None
    memory: Policy
    reason: str = ""
    grad: bool = True
    parameters: tuple[Tensor, ...] = ()
    run_eagerly: Run | None = None
    modules: tuple[nn.Module, ...] = ()

    @property
    def inputs(self) -> list[Tensor]:
        return self.tensors[: self.num_inputs]

    def forward(
        self, run: Run | None = None, num_steps: int | None = None
    ) -> tuple[Sequence[Tensor], list[Tensor]]:
        """Run the scan on new leaves: (outputs, leaves that receive a gradient in backward).

        Args:
            run: what to run; None for `self.run`.
            num_steps: the number of leading steps to run, None for all.
        """
        tensors = [leaf(x[:num_steps]) for x in self.inputs]
        tensors += map(leaf, self.tensors[self.num_inputs :])
        leaves = [x for x in (*tensors, *self.parameters) if x.requires_grad]
        with torch.set_grad_enabled(self.grad):
            outputs = (run or self.run)(tensors)
        return outputs, leaves if any(y.requires_grad for y in outputs) else []


def leaf(x: Tensor) -> Tensor:
    """Return `x` as a leaf that requires a gradient if `x` does."""
    return x.detach().requires_grad_(x.requires_grad)


def scan_of_call(
    name: str,
    neuron: Neuron,
    scan: Scan,
    arguments: Arguments[Tensor],
    wanted: Wanted,
    policy: Policy,
) -> NeuronScan:
    """Describe `scan(arguments, wanted)`, which a neuron, a layer around it or a block of it has
    run.

    Args:
        wanted: with the implementation that ran.
        policy: of the call.
    """
    inputs, states, backend = arguments.inputs, arguments.states or (), wanted.impl
    norms, memory = (), None
    if isinstance(scan, partial) and scan.func is block.scan:
        norms, _, memory = scan.args
    owner = getattr(scan, "__self__", neuron)
    label = [type(norm).__name__ for norm in norms]
    label += ["residual"] * (len(norms) == 1 < len(inputs))
    label += [type(m).__name__ for m in dict.fromkeys((owner, neuron))]
    batch = bool(norms) and by_batch(norms[0])

    def run(tensors: Sequence[Tensor], scan: Scan = scan, backend: str = backend) -> Any:
        xs, state = tuple(tensors[: len(inputs)]), tuple(tensors[len(inputs) :]) or None
        if norms and backend == "reference":
            xs, scan = (_normalized(norms, xs),), partial(scan_neuron, neuron)
        return scan(Arguments(xs, state), wanted._replace(impl=backend)).outputs

    modules = owner, *norms
    return NeuronScan(
        name=name,
        label=" + ".join(label),
        tensors=[*map(leaf, (*inputs, *states))],
        num_inputs=len(inputs),
        num_normalized=len(norms) if batch else 0,
        run=run,
        program=None if backend == "reference" else _program_of(neuron, norms, inputs, wanted),
        memory=memory or policy,
        grad=torch.is_grad_enabled(),
        parameters=tuple(x for m in modules for x in (*m.parameters(), *m.buffers())),
        run_eagerly=partial(run, backend="reference"),
        modules=(neuron, *norms),
    )


@torch.no_grad()
def _program_of(
    neuron: Neuron, norms: Sequence[_BatchNorm], inputs: Sequence[Tensor], wanted: Wanted
) -> str:
    if not norms:
        return choose(neuron, inputs[0], wanted)[0]
    kind = Kind(len(inputs) > 1, by_batch(norms[0]), len(norms) > 1)
    return prepare_block(neuron, wanted.impl, kind, wanted.outputs).name


def _normalized(norms: Iterable[_BatchNorm], inputs: Sequence[Tensor]) -> Tensor:
    """The sum of the inputs, of which the first are normalized."""
    values = list(inputs)
    for i, norm in enumerate(norms):
        batch, affine, x = by_batch(norm), (norm.weight, norm.bias), values[i]
        running = (None, None) if batch else (norm.running_mean, norm.running_var)
        y = nn.functional.batch_norm(x.flatten(0, 1), *running, *affine, batch, eps=norm.eps)
        values[i] = y.unflatten(0, x.shape[:2])
    return sum(values[1:], values[0])
