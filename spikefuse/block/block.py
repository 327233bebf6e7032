"""Batch norm, residual and neuron as one operation."""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from spikefuse import reference
from spikefuse.block import relayed_passes
from spikefuse.block.batch_norm import (
    NORMS,
    Ranks,
    batch_statistics,
    by_batch,
    momentum_of,
    running_of,
    shift_of,
)
from spikefuse.block.definition import behind_norm
from spikefuse.block.passes import Given, Job, Kernels, apply
from spikefuse.kernels.norm import move
from spikefuse.memory.policies import Checkpoint, Policy
from spikefuse.neurons.definition import Outputs, States
from spikefuse.nn.neuron import Neuron, backend_of, bits_wanted, calls, check, mark
from spikefuse.nn.shard import Shard
from spikefuse.scan import op as launch
from spikefuse.scan.execution import Call, call_of, spec
from spikefuse.scan.program import kind_of, prepare, program

#: What errors call the inputs.
NAMES = ("x", "residual")


class Block(nn.Module):
    """Batch norm, a residual and a neuron as one operation, fused over time.

    Equation, with the neuron's `step`, statistics over T, B and space, per channel::

        u = (x - mean) * weight / sqrt(variance + eps) + bias + residual
        y = neuron(u)

    Training and evaluation, running statistics, `momentum`, `affine` and `eps` are those of the
    norm, whatever its mode. What backward keeps is x, the residual and the statistics; neither u
    nor the neuron's potential is ever in memory.

    Call: `block(x, residual=None, state=None, return_state=False, impl="auto")`

    Args:
        norm: an `nn.BatchNorm1d`, `2d`, `3d` or `nn.SyncBatchNorm`.
        neuron: takes one input.
        memory: a policy of `spikefuse.memory`, which decides whether the neuron's states are kept
            for backward; None for that of `Temporal`, which is `Recompute()` if there is none.
            Not `Checkpoint()`, which is for networks.

    Shapes: `x` and `residual` are `[T, B, C, ...]`, float32, bfloat16 or float16, in any layout;
    inside `Temporal` they are folded, as all tensors are. Others as in `Neuron`. Arithmetic is
    float32. `impl="reference"` is the eager loop, any device, also float64.

    Raises:
        TypeError, ValueError: wrong modules, shapes or dtypes.

    Source: Liang et al., "Accelerating Spatiotemporal Supervised Training of Large-Scale Spiking
    Neural Networks on GPU", folds norm and neuron into one kernel; Ioffe and Szegedy, "Batch
    Normalization", for the norm and its gradient.
    """

    is_leaf = True  # of traced graphs

    def __init__(self, norm: _BatchNorm, neuron: Neuron, memory: Policy | None = None) -> None:
        super().__init__()
        if type(norm) not in NORMS:
            raise TypeError(f"norm is a {type(norm).__name__}: expected one of torch's batch norms")
        if not isinstance(neuron, Neuron):
            raise TypeError(f"neuron is a {type(neuron).__name__}: expected a spikefuse.Neuron")
        if memory is not None and not isinstance(memory, Policy):
            raise TypeError(f"memory is {memory!r}: expected a policy of spikefuse.memory, or None")
        if isinstance(memory, Checkpoint):
            raise ValueError(
                f"memory is {memory!r}, which computes whole networks again: pass it to "
                "Temporal(net, memory=...), and here another policy or None"
            )
        self.norm, self.neuron, self.memory = norm, neuron, memory

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        *,
        state: States | None = None,
        return_state: bool = False,
        impl: str = "auto",
    ) -> Any:
        run = partial(scan, self.norm, self.neuron, self.memory)
        return self.neuron.call(run, _inputs(x, residual), state, return_state, impl)


def _inputs(x: Tensor, residual: Tensor | None) -> tuple[Tensor, ...]:
    return (x,) if residual is None else (x, residual)


def scan(
    norm: _BatchNorm,
    neuron: Neuron,
    memory: Policy | None,
    inputs: tuple[Tensor, ...],
    state: States | None,
    impl: str,
    return_state: bool,
    relay: Shard | None = None,
) -> tuple[Outputs, States]:
    """(outputs, final states) on inputs `[T, B, C, ...]`, whatever Temporal tells.

    Args:
        relay: the processes that have the steps before and after.
    """
    backend, revises = backend_of(inputs, impl), by_batch(norm)
    check(neuron, NAMES[: len(inputs)], inputs, state, backend)
    check_norm(norm, neuron, inputs[0], revises)
    if backend == "reference":
        return _reference(norm, neuron, inputs, state)
    if torch.compiler.is_compiling():
        u = _folded(norm, inputs[0])
        u = u if len(inputs) == 1 else u + inputs[1]
        return neuron._scan((u,), state, impl, return_state, relay)
    launch.check(backend, inputs[0])
    chosen, own = kernels_of(neuron, backend, len(inputs) > 1, revises)
    states, bits = list(state or ()), bits_wanted(inputs[0])
    if revises:
        how = memory, return_state, relay, bits
        outputs, finals = _train(norm, chosen, own, inputs, states, *how)
    else:
        outputs, finals = _evaluate(norm, chosen, own, inputs, states, return_state, relay, bits)
    mark(outputs, chosen.binary, bits)
    return outputs, finals


def _keeps_states(memory: Policy | None, call: Call) -> bool:
    sequence = calls.sequence
    if memory is not None or sequence is None:
        return memory is not None and memory.keeps_states
    keeps = sequence.policy.keeps_states
    if not keeps:
        before = sequence.rebuilt.get(sequence.current, 0)
        sequence.rebuilt[sequence.current] = before + call.num_stored_bytes
    return keeps


def check_norm(norm: _BatchNorm, neuron: Neuron, x: Tensor, revises: bool) -> None:
    """Refuse what a block does not take.

    Args:
        revises: whether the norm takes its statistics `by_batch`.
    """
    if len(type(neuron).input_names) != 1:
        raise TypeError(f"{type(neuron).__name__} takes several inputs: a block gives it one")
    shape = x.shape
    if len(shape) < 3 or shape[2] != norm.num_features:
        raise ValueError(
            f"x has shape {list(shape)}: expected [T, B, C, ...] with C = {norm.num_features}, "
            "the number of features of the norm"
        )
    if revises and x.numel() == shape[2]:
        raise ValueError(
            f"x has shape {list(shape)}: one value per channel has no variance, so that batch "
            "norm can't be trained on it"
        )


def _folded(norm: nn.Module, x: Tensor) -> Tensor:
    """The norm itself, on a sequence."""
    y: Tensor = norm(x.flatten(0, 1)).unflatten(0, x.shape[:2])
    return y


def _reference(
    norm: _BatchNorm, neuron: Neuron, inputs: tuple[Tensor, ...], state: States | None
) -> tuple[Outputs, States]:
    x = inputs[0].to(torch.promote_types(inputs[0].dtype, torch.float32))
    if by_batch(norm):
        variance, mean = torch.var_mean(x, [0, 1, *range(3, x.ndim)], correction=0)
        number = x.numel() / x.shape[2]
        with torch.no_grad():
            move(running_of(norm), mean, variance * (number / (number - 1)), momentum_of(norm))
    else:
        assert norm.running_mean is not None and norm.running_var is not None
        mean, variance = norm.running_mean, norm.running_var
    inverse = torch.rsqrt(variance + norm.eps)
    scale = inverse if norm.weight is None else inverse * norm.weight
    definition = behind_norm(neuron, mean, scale, shift_of(norm, x), len(inputs) > 1)
    # Of x in one dtype, so that its gradient is rounded once.
    outputs, finals = reference.scan(definition, (x, *inputs[1:]), state)
    dtype = reduce(torch.promote_types, (x.dtype for x in inputs))
    return tuple(y.to(dtype) for y in outputs), finals


def kernels_of(
    neuron: Neuron, backend: str, adds: bool, revises: bool
) -> tuple[Kernels, list[Any]]:
    """The program, and the neuron's own tensors that it reads."""
    description = neuron.description()
    values = description.values()
    kinds = [value.ndim for value in values.values() if isinstance(value, Tensor)]
    key = "block", backend, adds, revises, *kinds
    made = description.notes.get(key)
    if made is None:
        made = description.notes[key] = _make_kernels(neuron, backend, adds, revises)
    return made, [values[name] for name in made.own]


def _make_kernels(neuron: Neuron, backend: str, adds: bool, revises: bool) -> Kernels:
    placeholder = torch.zeros(1)
    definition = behind_norm(neuron, placeholder, placeholder, placeholder, adds, revises)
    values, statics = definition.describe()
    kinds = tuple((name, kind_of(value)) for name, value in values.items())
    name, used = prepare(definition, backend, statics, kinds)
    labels = tuple(label for label in used if isinstance(values[label], Tensor))
    made = program(name)
    return Kernels(
        name=name,
        binary=made.step.binary,
        num_states=len(made.step.states),
        backend=backend,
        revises=revises,
        rebuilds=made.rebuilds,
        scalars=[v for v in map(values.__getitem__, used) if isinstance(v, float)],
        labels=labels,
        own=tuple(n.removeprefix("neuron.") for n in labels if n.startswith("neuron.")),
    )


def _evaluate(
    norm: _BatchNorm,
    kernels: Kernels,
    own: list[Tensor],
    inputs: tuple[Tensor, ...],
    states: list[Tensor],
    return_state: bool,
    relay: Shard | None,
    bits: list[Tensor] | None,
) -> tuple[Outputs, States]:
    """With running statistics: the norm is an affine map."""
    assert norm.running_mean is not None and norm.running_var is not None
    scale = torch.rsqrt(norm.running_var + norm.eps)
    scale = scale if norm.weight is None else scale * norm.weight
    params = kernels.tensors((norm.running_mean, scale, shift_of(norm, inputs[0])), own)
    num_finals = kernels.num_states if return_state else 0
    return launch.run(
        kernels.name,
        len(kernels.binary),
        num_finals,
        list(inputs),
        states,
        params,
        kernels.scalars,
        relay,
        bits,
    )


def _train(
    norm: _BatchNorm,
    kernels: Kernels,
    own: list[Tensor],
    inputs: tuple[Tensor, ...],
    states: list[Tensor],
    memory: Policy | None,
    return_state: bool,
    relay: Shard | None,
    bits: list[Tensor] | None,
) -> tuple[Outputs, States]:
    """With the statistics of the batch."""
    weight, shift = norm.weight, shift_of(norm, inputs[0])
    call = call_of(kernels.name, spec(inputs))
    keeps = not kernels.rebuilds or _keeps_states(memory, call)
    ranks = relay.all if relay is not None and relay.exact_statistics else None
    job = start(norm, kernels, call, inputs, len(states), keeps, return_state, ranks)
    tensors = (*inputs, *states, weight, shift, *own)
    if relay is not None:
        found, ends = relayed_passes.train(job, relay, tensors, bits)
        return tuple(found), tuple(ends)
    if torch.is_grad_enabled() and True in [t.requires_grad for t in tensors if t is not None]:
        results, end = apply(job, bits, *tensors), len(kernels.binary)
        return tuple(results[:end]), tuple(results[end:])
    outputs, finals, _ = job.forward(job.call, Given(inputs, states, shift, own), False, bits)
    return tuple(outputs), tuple(finals)


def start(
    norm: _BatchNorm,
    kernels: Kernels,
    call: Call,
    inputs: tuple[Tensor, ...],
    num_states: int,
    keeps_states: bool,
    return_state: bool,
    ranks: Ranks | None = None,
) -> Job:
    """Take the statistics of the batch, and note all that does not change in this call."""
    found, number, ranks = batch_statistics(norm, inputs[0], kernels.backend, ranks)
    return Job(
        kernels, call, found, number, ranks, len(inputs), num_states, keeps_states, return_state
    )
