"""Batch norm, residual and neuron as one operation."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial, reduce
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from spikefuse import reference
from spikefuse.block import library
from spikefuse.block.batch_norm import NORMS, collectives_of, running_of, shift_of
from spikefuse.block.definition import with_batch_norm
from spikefuse.block.program import BlockExecution, block_program
from spikefuse.block.training import BatchStatistics, TrainingCall
from spikefuse.kernels.norm import by_batch, merge_statistics, statistics
from spikefuse.kernels.running import Running, update_running_stats
from spikefuse.memory.policies import Checkpoint, Policy
from spikefuse.neurons.definition import Neuron, Outputs, States, with_outputs
from spikefuse.nn.call import active, mark_binary, wants_bits
from spikefuse.nn.neuron import backend_of, call_neuron, check_inputs, checked_names
from spikefuse.scan import op
from spikefuse.scan.execution import Arguments, Execution, Wanted, execution_of
from spikefuse.scan.layout import MAX_STRIDES, flatten_steps, unflatten_steps
from spikefuse.scan.op import Request
from spikefuse.scan.state_passing import WHOLE

#: The names of the inputs in error messages.
NAMES = ("x", "residual")
_TENSORS = "weight", "bias", "running_mean", "running_var", "num_batches_tracked"
_tensors_of = attrgetter(*_TENSORS)


class Block(nn.Module):
    """Batch norm, a residual and a neuron as one operation, fused over time.

    Equation, with the neuron's `step`, statistics over T, B and space, per channel::

        u = (x - mean) * weight / sqrt(variance + eps) + bias + residual
        y = neuron(u)

    Training and evaluation, running statistics, `momentum`, `affine` and `eps` are the norm's. For
    backward, x, the residual and the statistics are saved. Neither u nor the neuron's potential is
    stored, except for a potential in `outputs`.

    Args:
        norm: an `nn.BatchNorm1d`, `2d`, `3d` or `nn.SyncBatchNorm`.
        neuron: takes one input.
        memory: a policy of `spikefuse.memory`, which decides whether the neuron's states are saved
            for backward; None for the policy of `Temporal`, or `Recompute()` outside. Not
            `Checkpoint()`, which is for networks.

    Source: Liang et al., "Accelerating Spatiotemporal Supervised Training of Large-Scale Spiking
    Neural Networks on GPU", folds norm and neuron into one kernel; Ioffe and Szegedy, "Batch
    Normalization", for the norm and its gradient.

    Call: `block(x, residual=None, state=None, return_state=False, impl="auto", outputs=None)`

    Args:
        x, residual: `[T, B, C, ...]`, float32, bfloat16 or float16, in any layout. Inside
            `Temporal` they are folded, as all tensors are. Without a residual, nothing is added.
            Arithmetic is float32.
        state, return_state, impl, outputs: see `Neuron`.

    Returns:
        As in `Neuron`.

    Raises:
        TypeError, ValueError: wrong modules, shapes or dtypes.
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
                f"memory is {memory!r}, which recomputes whole networks: pass it to "
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
        outputs: tuple[str, ...] | None = None,
    ) -> Any:
        names = () if outputs is None else checked_names(outputs)
        inputs = (x,) if residual is None else (x, residual)
        run = partial(scan, (self.norm,), self.neuron, self.memory)
        return call_neuron(
            self.neuron, run, Request(inputs, state, impl, return_state, outputs=names)
        )


def scan(
    norms: tuple[_BatchNorm, ...], neuron: Neuron, memory: Policy | None, request: Request
) -> tuple[Outputs, States]:
    """Run norms and neuron as one on inputs `[T, B, C, ...]`: (outputs, final states).

    Args:
        norms: of x, and of the residual where `can_normalize_residual`.
    """
    inputs, passing, norm = request.inputs, request.passing, norms[0]
    backend, batch = backend_of(inputs, request.backend), by_batch(norm)
    alone = batch and (passing is None or passing.statistics is None)
    if backend == "reference" or torch.compiler.is_compiling():
        check_inputs(neuron, NAMES[: len(inputs)], inputs, request.state, backend)
        check_norms(norms, neuron, inputs[0], backend, alone)
        if backend == "reference":
            return _reference(norms, neuron, request)
        op.check_backend(backend, inputs[0])
        return _trace(norms, neuron, memory, request._replace(backend=backend))
    description = neuron.description()
    values: dict[str, Any] = description.values()
    # What blocks of the neuron share on inputs of one description, once these are checked.
    known: dict[Hashable, BlockExecution] = description.cache.setdefault("blocks", {})
    key: list[Hashable] = [backend, batch, alone, len(norms), norm.num_features, request.outputs]
    for name, _, _ in description.tensors:
        key += values[name].shape, values[name].device, values[name].requires_grad
    for x in inputs:  # others are unknown, so `check_inputs` raises an error
        key += (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else (None,)
    for each in norms:
        for t in _tensors_of(each):
            key += (None,) if t is None else (t.shape, t.dtype, t.device, t.stride())
    block = known.get(tuple(key))
    if block is None or request.state is not None:
        check_inputs(neuron, NAMES[: len(inputs)], inputs, request.state, backend)
        check_norms(norms, neuron, inputs[0], backend, alone)
    op.check_backend(backend, inputs[0])
    if block is None:
        options = len(inputs) > 1, batch, request.outputs, len(norms) > 1
        program, own = block_program(neuron, backend, *options)
        for label, value in zip(program.own, own, strict=True):
            op.check_param(neuron, label, value, inputs[0])
        if len(known) >= MAX_STRIDES:
            known.clear()
        block = known[tuple(key)] = BlockExecution(program, execution_of(program.name, inputs))
    program, execution = block
    own = [*map(values.__getitem__, program.own)]
    states, bits, shift = request.state or (), wants_bits(inputs[0]), shift_of(norms, inputs[0])
    if batch:
        saves = not program.rebuilds or _saves_states(memory)
        tensors = [*inputs, *states, *own, shift]
        for each in norms:
            if each.weight is not None:
                tensors.append(each.weight)
        if execution.is_new and passing is None:
            _compile_forward(block, request, tensors, saves, bits)
        call = training_call(norms, block, request, saves, bits)
        results = op.execute(call, tensors, request.final)
    else:
        mean, scale, *residual = [value for each in norms for value in _running_values(each)]
        params = program.params((mean, scale, shift, *residual, *own))
        arguments = Arguments(inputs, states, params, program.scalars)
        wanted = Wanted(False, request.final, bits)
        results = op.run(program.name, arguments, wanted, passing)
    if bits:
        mark_binary(results, program.binary)
    return tuple(results.outputs), tuple(results.finals)


def _compile_forward(
    block: BlockExecution, request: Request, tensors: list[Tensor], saves_states: bool, bits: bool
) -> None:
    """Begin to compile the forward kernel on a thread, beside the kernel of the statistics."""
    program, execution = block
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    unknown = [torch.empty(0, device="meta")] * len(program.tensors)
    arguments = Arguments(request.inputs, request.state or (), unknown, program.scalars)
    wanted = Wanted(saves_states and needs_grad, request.final, bits)
    execution.compile_forward(arguments, wanted)


def _trace(
    norms: tuple[_BatchNorm, ...], neuron: Neuron, memory: Policy | None, request: Request
) -> tuple[Outputs, States]:
    """In a graph of torch.compile."""
    batch = by_batch(norms[0])
    program = library.traced_program(neuron, batch, len(norms) > 1, request)
    for label, value in zip(program.own_names, program.own, strict=True):
        op.check_param(neuron, label, value, request.inputs[0])
    if batch:
        saves = memory is not None and memory.saves_states
        results = library.train(norms, program, saves, request)
    else:
        mean, scale, *residual = [value for norm in norms for value in _running_values(norm)]
        values = mean, scale, shift_of(norms, request.inputs[0]), *residual
        results = library.evaluate(values, program, request)
    return tuple(results.outputs), tuple(results.finals)


def can_normalize_residual(norm: _BatchNorm, residual_norm: _BatchNorm) -> bool:
    """Whether one block can compute both norms."""
    weight, other = norm.weight, residual_norm.weight
    return (
        by_batch(norm) == by_batch(residual_norm)
        and norm.num_features == residual_norm.num_features
        and not isinstance(norm, nn.SyncBatchNorm)
        and not isinstance(residual_norm, nn.SyncBatchNorm)
        and weight is not None
        and other is not None
        and weight.dtype is other.dtype
    )


def training_call(
    norms: Sequence[_BatchNorm],
    block: BlockExecution,
    request: Request,
    saves_states: bool,
    bits: bool = False,
) -> TrainingCall:
    """Take the statistics of the batch, and note all that does not change in this call.

    Args:
        norms: of the input, and of the residual if it has one.
    """
    passing, backend = request.passing or WHOLE, block.program.backend
    results: list[tuple[Tensor, float | Tensor]] = []
    for norm, x in zip(norms, request.inputs, strict=False):
        weight, eps, running = norm.weight, norm.eps, running_of(norm)
        count, collectives = x.numel() / norm.num_features, passing.statistics
        if isinstance(norm, nn.SyncBatchNorm):
            collectives = collectives_of(norm)
        if collectives is None:
            results.append((statistics(x, weight, running, eps, backend), count))
        else:
            own = statistics(x, None, Running(), eps, backend)
            shares = collectives.gather(torch.cat((own[0], own[3], own.new_full((1,), count))))
            results.append(merge_statistics(shares, weight, running, eps, backend))
    by_norm, numbers = zip(*results, strict=True)
    batch, num_states = BatchStatistics(by_norm, numbers[0], collectives), len(request.state or ())
    return TrainingCall(block, batch, num_states, passing, bits, saves_states)


def _saves_states(memory: Policy | None) -> bool:
    if memory is None and active.call is not None:
        memory = active.call.policy
    return memory is not None and memory.saves_states


def _running_values(norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Mean and scale of the affine map that the norm is with running statistics."""
    assert norm.running_mean is not None and norm.running_var is not None
    mean, scale = norm.running_mean, torch.rsqrt(norm.running_var + norm.eps)
    if torch.is_grad_enabled():  # backward may follow a call in training, which updates the mean
        mean = mean.clone()
    return mean, scale if norm.weight is None else scale * norm.weight


def _reference(
    norms: tuple[_BatchNorm, ...], neuron: Neuron, request: Request
) -> tuple[Outputs, States]:
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return _unfused(norms, neuron, request)
    inputs = request.inputs
    x, values = _reference_values(norms[0], inputs[0])
    xs = x, *inputs[1:]
    if len(norms) > 1:
        residual, (mean, scale, shift) = _reference_values(norms[1], inputs[1])
        xs, values = (x, residual), (*values[:2], values[2] + shift, mean, scale)
    definition = with_batch_norm(neuron, values, len(inputs) > 1, by_batch=False)
    definition = with_outputs(definition, request.outputs)
    # x in a single dtype, so that its gradient is rounded once.
    outputs, finals = reference.scan(definition, xs, request.state)
    dtype = reduce(torch.promote_types, (x.dtype for x in inputs))
    return tuple(y.to(dtype) for y in outputs), finals


def _unfused(
    norms: tuple[_BatchNorm, ...], neuron: Neuron, request: Request
) -> tuple[Outputs, States]:
    """The reference in a graph, which other programs know how to run: the norms of torch.nn."""
    inputs = list(request.inputs)
    for i, norm in enumerate(norms):
        inputs[i] = unflatten_steps(norm(flatten_steps(inputs[i])), inputs[i].shape[0])
    definition = with_outputs(neuron, request.outputs)
    return reference.scan(definition, (reduce(torch.add, inputs),), request.state)


def _reference_values(norm: _BatchNorm, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`x` in at least single precision, and mean, scale and shift of its norm."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if by_batch(norm):
        variance, mean = torch.var_mean(x, [0, 1, *range(3, x.ndim)], correction=0)
        number = x.numel() / x.shape[2]
        with torch.no_grad():
            update_running_stats(running_of(norm), mean, variance * (number / (number - 1)))
    else:
        assert norm.running_mean is not None and norm.running_var is not None
        mean, variance = norm.running_mean, norm.running_var
    inverse = torch.rsqrt(variance + norm.eps)
    scale = inverse if norm.weight is None else inverse * norm.weight
    return x, (mean, scale, shift_of((norm,), x))


def check_norms(
    norms: Sequence[_BatchNorm], neuron: Neuron, x: Tensor, backend: str, alone: bool
) -> None:
    """Check that a block of these norms and this neuron can run on `x`.

    Args:
        alone: whether the statistics are those of the inputs alone, not of other processes too.

    Raises:
        TypeError, ValueError: it cannot.
    """
    if len(type(neuron).input_names) != 1:
        raise TypeError(f"{type(neuron).__name__} takes several inputs: a block has one")
    shape, num_features = x.shape, norms[0].num_features
    if len(shape) < 3 or shape[2] != num_features:
        raise ValueError(
            f"x has shape {list(shape)}: expected [T, B, C, ...] with C = {num_features}, "
            "the number of features of the norm"
        )
    if alone and x.numel() == shape[2]:
        raise ValueError(
            f"x has shape {list(shape)}: one value per channel has no variance, so that batch "
            "norm can't be trained on it"
        )
    for norm in norms:
        for name in _TENSORS:
            t = getattr(norm, name)
            if t is None:
                continue
            if t.device != x.device:
                raise ValueError(
                    f"{name} of the norm is on {t.device}, x on {x.device}: move the norm with "
                    f".to({str(x.device)!r})"
                )
            if t.ndim and t.shape != (num_features,):  # all but the number of batches
                raise ValueError(
                    f"{name} of the norm has shape {list(t.shape)}: expected [{num_features}]"
                )
            if t.ndim and t.dtype == torch.float64 and backend != "reference":
                raise TypeError(
                    f"{name} of the norm is {t.dtype}: expected float32, bfloat16 or float16; "
                    'convert the norm with .float() (or impl="reference")'
                )
            by_kernel = backend == "triton" and by_batch(norm) and name != "bias"
            if by_kernel and not t.is_contiguous():
                raise ValueError(
                    f"{name} of the norm has strides {t.stride()}: assign a contiguous tensor"
                )
