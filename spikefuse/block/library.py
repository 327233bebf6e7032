"""Blocks as PyTorch library ops, with their fakes and autograd, for torch.compile.

`spikefuse::norm_statistics` returns the results of `kernels.norm.statistics`, and the unbiased
variance. `spikefuse::block` runs a block in training on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from spikefuse.block.batch_norm import shift_of, update_traced_stats
from spikefuse.block.definition import NORM_VALUES, value_names
from spikefuse.block.program import BlockExecution, BlockProgram, block_program
from spikefuse.block.training import BatchStatistics, TrainingCall
from spikefuse.kernels.norm import statistics
from spikefuse.kernels.running import Running
from spikefuse.neurons.definition import Neuron
from spikefuse.scan import op
from spikefuse.scan.execution import (
    Arguments,
    Flags,
    MaybeTensors,
    Results,
    Tensors,
    Wanted,
    execution_of,
)
from spikefuse.scan.op import Call, Request
from spikefuse.scan.program import kinds_of

op.library.define(
    "norm_statistics(Tensor x, Tensor? weight, float eps, str backend) -> (Tensor, Tensor)"
)

_programs: dict[str, BlockProgram] = {}


class TracedProgram(NamedTuple):
    """What a traced graph knows of a `BlockProgram`.

    Attributes:
        scalars, own: the values of the neuron that the program reads.
        rebuilds: whether backward can do without saved states.
        tensors: the names of the program's tensor parameters.
        own_names: the names of the tensors in `own`.
    """

    name: str
    scalars: list[float]
    own: list[Tensor]
    rebuilds: bool
    tensors: tuple[str, ...]
    own_names: tuple[str, ...]


def traced_program(
    neuron: Neuron, by_batch: bool, normalizes_residual: bool, request: Request
) -> TracedProgram:
    """`block_program` inside torch.compile."""
    values: dict[str, Any] = neuron.values()
    kind = len(request.inputs) > 1, by_batch, request.outputs, normalizes_residual
    name, scalars, own, rebuilds, tensors = neuron.evaluate(
        _prepare, request.backend, request.inputs[0].device, kind, kinds_of(values)
    )
    read = [values[n] for n in scalars], [values[n] for n in own]
    return TracedProgram(name, *read, rebuilds, tensors, own)


def _prepare(
    neuron: Neuron,
    backend: str,
    device: torch.device,
    kind: tuple[bool, bool, tuple[str, ...], bool],
    kinds: tuple[tuple[str, str], ...],
) -> tuple[Any, ...]:
    program, _ = block_program(neuron, backend, *kind)
    add(program, device)
    return program.name, program.floats, program.own, program.rebuilds, program.tensors


def add(program: BlockProgram, device: torch.device) -> None:
    """Make a program known to graphs, by its name."""
    if program.backend == "triton":
        from spikefuse.kernels.norm_triton import reserve_counters

        reserve_counters(device)  # before Inductor records a graph
    _programs[program.name] = program


def train(
    norms: Sequence[_BatchNorm], program: TracedProgram, saves_states: bool, request: Request
) -> Results:
    """A block with the statistics of the batch, in a traced graph."""
    states, found = request.state or (), []
    for norm, x in zip(norms, request.inputs, strict=False):
        weight = None if norm.weight is None else norm.weight.detach()
        with torch.no_grad():
            values, unbiased = torch.ops.spikefuse.norm_statistics(
                x.detach(), weight, norm.eps, request.backend
            )
        update_traced_stats(norm, values[0], unbiased)
        found.append(values)
    weights = [norm.weight for norm in norms if norm.weight is not None]
    shift = shift_of(norms, request.inputs[0])
    tensors = [*request.inputs, *states, *program.own, shift, *weights, *found]
    counts, saves_states = [len(request.inputs), len(states)], saves_states or not program.rebuilds
    call = TracedTrainingCall([program.name], counts, program.scalars, saves_states=saves_states)
    return op.execute(call, tensors, request.final)


def evaluate(norm: Sequence[Tensor], program: TracedProgram, request: Request) -> Results:
    """A block with running statistics, in a traced graph; `norm` as in `with_batch_norm`."""
    names = [*value_names(len(norm) > len(NORM_VALUES), by_batch=False)]
    names += [f"neuron.{name}" for name in program.own_names]
    values = dict(zip(names, (*norm, *program.own), strict=True))
    params = [values[name] for name in program.tensors]
    arguments = Arguments(request.inputs, request.state or (), params, program.scalars)
    return op.run(program.name, arguments, Wanted(False, request.final))


def _statistics(
    x: Tensor, weight: Tensor | None, eps: float, backend: str
) -> tuple[Tensor, Tensor]:
    values = statistics(x, weight, Running(), eps, backend)
    number = x.numel() / x.shape[2]
    return values, values[3] * (number / (number - 1))


def _statistics_fake(
    x: Tensor, weight: Tensor | None, eps: float, backend: str
) -> tuple[Tensor, Tensor]:
    values = x.new_empty((4, x.shape[2]), dtype=torch.float32)
    return values, values.new_empty((x.shape[2],))


class TracedTrainingCall(Call):
    """A block in training, in a traced graph. Its tensors are those of a `TrainingCall`, and the
    statistics of each norm."""

    op = "block"

    def forward(self, tensors: Tensors, save: bool, final: bool) -> tuple[Tensors, Tensors]:
        others = tensors[: -self.num_norms]
        return self._training(tensors, save).forward(others, save, final)

    def backward(self, tensors: Tensors, grads: MaybeTensors, needed: Flags) -> list[Tensor]:
        saved, tensors = tensors[len(needed) :], tensors[: len(needed)]
        needed = needed[: -self.num_norms]
        call, others = self._training(tensors, bool(saved)), tensors[: -self.num_norms]
        found = call.backward([*others[call.read], *saved], grads, needed)
        # The gradients of shift and weights are rows of one tensor, which an op must not return.
        norm = slice(sum(needed[: call.read.stop - 1]), None)
        found[norm] = map(torch.clone, found[norm])
        return found

    @property
    def num_norms(self) -> int:
        return 1 + _programs[self.programs[0]].normalizes_residual

    def _training(self, tensors: Tensors, saves_states: bool) -> TrainingCall:
        (name,), (split, num_states) = self.programs, self.counts
        inputs = tensors[:split]
        number = inputs[0].numel() / inputs[0].shape[2]
        batch = BatchStatistics(tensors[-self.num_norms :], number)
        block = BlockExecution(_programs[name], execution_of(name, inputs))
        call = TrainingCall(block, batch, num_states, saves_states=saves_states)
        call.scalars = self.scalars
        return call


op.implement("norm_statistics", _statistics, _statistics_fake)
op.register(TracedTrainingCall)
