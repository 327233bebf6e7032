"""Blocks as PyTorch library ops, with their fakes and autograd, for torch.compile.

`spikefuse::norm_statistics` returns the results of `kernels.norm.statistics`, and the unbiased
variance. `spikefuse::block` runs a block in training on the statistics, the inputs, the initial
states, the weight of the norm if it has one, the shift, and the neuron's own tensors; `counts`
counts inputs, states and weights. It returns outputs, final states (if asked) and saved states (if
asked).
`spikefuse::block_backward` also takes the saved states, and the gradients of outputs and final
states. It returns the gradients of the needed inputs, of all initial states, of weight and shift,
and of the neuron's needed tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from spikefuse.block.batch_norm import momentum_of, running_of, shift_of
from spikefuse.block.program import BlockProgram, block_program
from spikefuse.block.training import BlockTensors, TrainingCall
from spikefuse.kernels.norm import statistics, update_running_stats
from spikefuse.neurons.definition import Definition
from spikefuse.scan import op
from spikefuse.scan.execution import (
    Arguments,
    Incoming,
    Needs,
    Results,
    Wanted,
    execution_of,
)
from spikefuse.scan.op import Request
from spikefuse.scan.program import kind_of, sizes_of

op.library.define(
    "norm_statistics(Tensor x, Tensor? weight, float eps, str backend) -> (Tensor, Tensor)"
)
op.library.define(
    "block(str program, Tensor[] tensors, int[] counts, float[] scalars, bool save, bool final) "
    "-> Tensor[]"
)
op.library.define(
    "block_backward(str program, Tensor[] tensors, int[] counts, float[] scalars, "
    "Tensor?[] grads, bool[] needed) -> Tensor[]"
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
    neuron: Definition, has_residual: bool, by_batch: bool, request: Request
) -> TracedProgram:
    """`block_program` inside torch.compile."""
    values: dict[str, Any] = neuron.values()
    kinds = tuple([(name, kind_of(value)) for name, value in values.items()])
    kind = has_residual, by_batch, request.outputs
    name, scalars, own, rebuilds, tensors = neuron.evaluate(
        _prepare, request.backend, request.inputs[0].device, kind, kinds
    )
    read = [values[n] for n in scalars], [values[n] for n in own]
    return TracedProgram(name, *read, rebuilds, tensors, own)


def _prepare(
    neuron: Definition,
    backend: str,
    device: torch.device,
    kind: tuple[bool, bool, tuple[str, ...]],
    kinds: tuple[tuple[str, str], ...],
) -> tuple[Any, ...]:
    program, _ = block_program(neuron, backend, *kind)
    if backend == "triton":
        from spikefuse.kernels.norm_triton import reserve_counters

        reserve_counters(device)  # before Inductor records a graph
    _programs[program.name] = program
    return program.name, program.floats, program.own, program.rebuilds, program.tensors


def train(
    norm: _BatchNorm, program: TracedProgram, saves_states: bool, request: Request
) -> Results:
    """A block with the statistics of the batch, in a traced graph."""
    x, weight, states = request.inputs[0], norm.weight, request.state or ()
    with torch.no_grad():
        values, unbiased = torch.ops.spikefuse.norm_statistics(
            x.detach(), None if weight is None else weight.detach(), norm.eps, request.backend
        )
        update_running_stats(running_of(norm), values[0], unbiased, momentum_of(norm))
    weights = [] if weight is None else [weight]
    tensors = [values, *request.inputs, *states, *weights, shift_of(norm, x), *program.own]
    counts = [len(request.inputs), len(states), len(weights)]
    save = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    save = save and (saves_states or not program.rebuilds)
    results = torch.ops.spikefuse.block(
        program.name, tensors, counts, program.scalars, save, request.final
    )
    return op.split_results(program.name, results, request.final)


def evaluate(norm: _BatchNorm, program: TracedProgram, scale: Tensor, request: Request) -> Results:
    """A block with running statistics, in a traced graph."""
    values: dict[str, Any] = dict(
        zip([f"neuron.{name}" for name in program.own_names], program.own, strict=True)
    )
    values["mean"], values["scale"] = norm.running_mean, scale
    values["shift"] = shift_of(norm, request.inputs[0])
    params = [values[name] for name in program.tensors]
    arguments = Arguments(request.inputs, request.state or (), params, program.scalars)
    return op.run(program.name, arguments, Wanted(False, request.final))


def _statistics(
    x: Tensor, weight: Tensor | None, eps: float, backend: str
) -> tuple[Tensor, Tensor]:
    values = statistics(x, weight, (None, None, None), 0.0, eps, backend)
    number = x.numel() / x.shape[2]
    return values, values[3] * (number / (number - 1))


def _statistics_fake(
    x: Tensor, weight: Tensor | None, eps: float, backend: str
) -> tuple[Tensor, Tensor]:
    values = x.new_empty((4, x.shape[2]), dtype=torch.float32)
    return values, values.new_empty((x.shape[2],))


class _Split(NamedTuple):
    statistics: Tensor
    block: BlockTensors
    saved: Sequence[Tensor]


def _split(name: str, tensors: Sequence[Tensor], counts: Sequence[int]) -> _Split:
    inputs, states, weights = counts
    statistics, *rest = tensors
    begin, shift = inputs + states, inputs + states + weights
    end = shift + 1 + len(_programs[name].own)
    block = BlockTensors(rest[:inputs], rest[inputs:begin], rest[shift], rest[shift + 1 : end])
    return _Split(statistics, block, rest[end:])


def _call(
    name: str, split: _Split, scalars: Sequence[float], saves_states: bool, final: bool
) -> TrainingCall:
    inputs = split.block.inputs
    execution, number = execution_of(name, inputs), inputs[0].numel() / inputs[0].shape[2]
    sizes = split.statistics, number, None
    return TrainingCall(_programs[name], execution, *sizes, saves_states, final, scalars=scalars)


def _block(
    name: str,
    tensors: list[Tensor],
    counts: list[int],
    scalars: list[float],
    save: bool,
    final: bool,
) -> list[Tensor]:
    split = _split(name, tensors, counts)
    results, _ = _call(name, split, scalars, save, final).forward(split.block, save, False)
    return [*results.outputs, *results.finals, *(results.saved or ())]


def _block_fake(
    name: str,
    tensors: list[Tensor],
    counts: list[int],
    scalars: list[float],
    save: bool,
    final: bool,
) -> list[Tensor]:
    execution = op.fake_execution(name, tensors[1 : 1 + counts[0]])
    results = execution.new_results(Wanted(save, final))
    return [*results.outputs, *results.finals, *(results.saved or ())]


def _block_backward(
    name: str,
    tensors: list[Tensor],
    counts: list[int],
    scalars: list[float],
    grads: list[Tensor | None],
    needed: list[bool],
) -> list[Tensor]:
    split, num_outputs = _split(name, tensors, counts), sizes_of(name)[0]
    block, saved = split.block, split.saved
    incoming = Incoming(grads[:num_outputs], grads[num_outputs:])
    call = _call(name, split, scalars, bool(saved), False)
    results = call.backward(block, saved, incoming, _needs(block, needed))
    dtype = block.shift.dtype
    states = [g.to(s.dtype) for g, s in zip(results.states, block.states, strict=True)]
    own = [g for g in results.own if g is not None]
    # The rows of one tensor, which an op must not return as they are.
    return [*results.inputs, *states, results.weight.to(dtype, copy=True),
            results.shift.to(dtype, copy=True), *own]  # fmt: skip


def _block_backward_fake(
    name: str,
    tensors: list[Tensor],
    counts: list[int],
    scalars: list[float],
    grads: list[Tensor | None],
    needed: list[bool],
) -> list[Tensor]:
    block = _split(name, tensors, counts).block
    needs = _needs(block, needed)
    execution = op.fake_execution(name, block.inputs)
    inputs = execution.new_gradients(needs._replace(params=())).inputs
    own = compress(block.own, needs.params)
    return [*inputs, *map(torch.empty_like, (*block.states, block.shift, block.shift, *own))]


def _needs(block: BlockTensors, needed: Sequence[bool]) -> Needs:
    """What backward computes; `needed` says so of each tensor but the saved ones."""
    inputs = tuple(needed[1 : 1 + len(block.inputs)])
    return Needs(inputs, False, tuple(needed[len(needed) - len(block.own) :]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    name, tensors, counts, scalars, _, final = inputs
    num_outputs, num_states = sizes_of(name)
    ctx.settings = name, counts, scalars
    ctx.num_tensors, ctx.end = len(tensors), num_outputs + (num_states if final else 0)
    ctx.save_for_backward(*tensors, *output[ctx.end :])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    (name, counts, scalars), tensors = ctx.settings, ctx.saved_tensors
    needed = [t.requires_grad for t in tensors[: ctx.num_tensors]]
    found = iter(
        torch.ops.spikefuse.block_backward(
            name, list(tensors), counts, scalars, list(grads[: ctx.end]), needed
        )
    )
    inputs, states, weights = counts
    gradients = [None, *(next(found) if need else None for need in needed[1 : 1 + inputs])]
    gradients += [next(found) for _ in range(states)]
    weight, shift = next(found), next(found)
    gradients += [weight] * weights + [shift]
    gradients += [next(found) if need else None for need in needed[len(gradients) :]]
    return None, gradients, None, None if scalars else [], None, None


op.implement("norm_statistics", _statistics, _statistics_fake, None)
op.implement("block", _block, _block_fake, (_backward, _setup_context))
op.implement("block_backward", _block_backward, _block_backward_fake, op.ONCE)
