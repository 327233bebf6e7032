"""Batch norm, residual and neuron as one operation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from spikefuse import reference
from spikefuse.block.batch_norm import NORMS, running_of, state_passing_of
from spikefuse.block.definition import Kind, with_batch_norm
from spikefuse.block.functional import (
    Norm,
    compile_ahead,
    eps_of_step,
    norm_statistics,
    reserve_counters,
    run_block,
    shift_of,
)
from spikefuse.block.program import prepare_block
from spikefuse.kernels.norm import BatchNorm, by_batch
from spikefuse.kernels.running import update_running_stats
from spikefuse.memory.policies import Checkpoint, Policy
from spikefuse.neurons.checks import is_plain
from spikefuse.neurons.definition import Neuron, States, with_outputs
from spikefuse.nn.call import active, mark_binary, wants_bits
from spikefuse.nn.neuron import backend_of, call_neuron, check_inputs, checked_names, from_rest
from spikefuse.nn.symbolic import leaf
from spikefuse.scan.checks import check_backend, check_param, refuse_transforms
from spikefuse.scan.kinds import Kinds, as_traced, kinds_of
from spikefuse.scan.layout import flatten_steps, unflatten_steps
from spikefuse.scan.records import Arguments, Results, Wanted
from spikefuse.scan.state_passing import StatePassing

#: The names of the inputs in error messages.
NAMES = ("x", "residual")
_TENSORS = "weight", "bias", "running_mean", "running_var", "num_batches_tracked"


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

    def __init__(self, norm: BatchNorm, neuron: Neuron, memory: Policy | None = None) -> None:
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

    @leaf
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
        _compute_pruned(self.norm)
        inputs = (x,) if residual is None else (x, residual)
        run = partial(scan, (self.norm,), self.neuron, self.memory)
        wanted = Wanted(return_state, outputs=names, impl=impl)
        return call_neuron(self.neuron, run, Arguments(inputs, state), wanted)


def _compute_pruned(norm: nn.Module) -> None:
    """Compute parameters as the hooks of torch.nn.utils.prune do, which run where a module is
    called, and a block only reads the norm."""
    for name in ("weight", "bias"):
        computed = not isinstance(getattr(norm, name), nn.Parameter | None)
        if computed and hasattr(norm, f"{name}_mask"):
            setattr(norm, name, getattr(norm, f"{name}_mask") * getattr(norm, f"{name}_orig"))


def scan(
    norms: tuple[BatchNorm, ...],
    neuron: Neuron,
    memory: Policy | None,
    arguments: Arguments[Tensor],
    wanted: Wanted,
) -> Results[Tensor]:
    """Run norms and neuron as one on inputs `[T, B, C, ...]`.

    Args:
        norms: of x, and perhaps of the residual: alike, with weights, and no `SyncBatchNorm`.
    """
    inputs, states, *_, passing = arguments
    backend, passing = backend_of(inputs, wanted.impl), state_passing_of(norms[0], passing)
    kind = kind_of(norms, len(inputs), backend)
    alone = kind.by_batch and (passing is None or passing.statistics is None)
    check_inputs(neuron, NAMES[: len(inputs)], inputs, states, backend)
    check_norms(norms, neuron, inputs[0], backend, alone)
    wanted = Wanted(wanted.final, wants_bits(inputs[0]), False, wanted.outputs, backend)
    arguments = from_rest(neuron, arguments)
    if backend == "reference":
        return _reference(norms, neuron, arguments, wanted)
    check_backend(backend, inputs[0])
    plain, save = is_plain(inputs), _saves_states(memory)
    if plain:
        block = prepare_block(neuron, backend, kind, wanted.outputs)
        values: dict[str, Any] = dict(neuron.description().values(neuron))
        program, own, floats = block.name, block.own, block.own_floats
    else:
        refuse_transforms(inputs)
        values = dict(neuron.values())
        about = inputs[0].device, tuple(kind), backend, wanted.outputs, kinds_of(values)
        program, own, floats = neuron.evaluate(_prepare, *about, *neuron.constant_values())
    for label in own:
        check_param(neuron, label, values[label], inputs[0])
        if values[label].ndim > 1:
            raise ValueError(
                f"parameter '{label}' has shape {list(values[label].shape)}: a block takes one "
                "value, or one per channel; run the norm and the neuron one after the other"
            )
    params, scalars = [values[label] for label in own], [values[label] for label in floats]
    arguments = Arguments(inputs, arguments.states, params, (), scalars, passing)
    wanted = Wanted(wanted.final, wanted.bits, save)
    if plain:
        compile_ahead(program, arguments, wanted._replace(save=save and torch.is_grad_enabled()))
    batches = [norm_of(norm, x, backend, passing) for norm, x in zip(norms, inputs, strict=False)]
    results = run_block(program, arguments, batches, wanted)
    if wanted.bits:
        mark_binary(results)
    return results


def kind_of(norms: Sequence[BatchNorm], num_inputs: int, backend: str) -> Kind:
    """What a block of norms computes in the present mode of gradients."""
    kind = Kind(num_inputs > 1, by_batch(norms[0]), len(norms) > 1)
    if kind.by_batch:
        return kind
    return kind._replace(eps=eps_of_step(backend, [(n.weight, n.bias, n.eps) for n in norms]))


def _prepare(
    neuron: Neuron,
    device: torch.device,
    kind: tuple[Any, ...],  # torch.compile takes no named tuples as constants
    backend: str,
    outputs: tuple[str, ...],
    kinds: Kinds,
    *constants: Any,
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """The program of a block in a graph of torch.compile, and the values that it reads."""
    neuron = as_traced(neuron, kinds, constants)
    block = prepare_block(neuron, backend, Kind(*kind), outputs)
    reserve_counters(backend, device)
    return block.name, block.own, block.own_floats


def norm_of(norm: BatchNorm, x: Tensor, backend: str, passing: StatePassing | None) -> Norm:
    """A norm with the statistics that it uses; in training, updates the running statistics."""
    weight, bias, eps = norm.weight, norm.bias, norm.eps
    if not by_batch(norm):
        return Norm(weight, bias, eps, mean=norm.running_mean, variance=norm.running_var)
    collectives = None if passing is None else passing.statistics
    statistics = norm_statistics(x, weight, eps, running_of(norm), backend, collectives)
    return Norm(weight, bias, eps, statistics)


def _saves_states(memory: Policy | None) -> bool:
    if memory is None and active.call is not None:
        memory = active.call.policy
    return memory is not None and memory.saves_states


def _reference(
    norms: tuple[BatchNorm, ...], neuron: Neuron, arguments: Arguments[Tensor], wanted: Wanted
) -> Results[Tensor]:
    inputs, definition = tuple(arguments.inputs), with_outputs(neuron, wanted.outputs)
    traced = not is_plain(()) or torch.jit.is_tracing()  # type: ignore[attr-defined]
    if traced or not inputs[0].numel():
        # The norms of torch.nn, which other programs know how to run, and which take empty batches.
        normed = [unflatten_steps(norm(flatten_steps(x)), len(x))
                  for norm, x in zip(norms, inputs, strict=False)]  # fmt: skip
        total = reduce(torch.add, (*normed, *inputs[len(norms) :]))
        return Results(*reference.scan(definition, (total,), arguments.states))
    x, values = _reference_values(norms[0], inputs[0])
    xs = x, *inputs[1:]
    if len(norms) > 1:
        residual, (mean, scale, shift) = _reference_values(norms[1], inputs[1])
        xs, values = (x, residual), (*values[:2], values[2] + shift, mean, scale)
    kind = Kind(len(inputs) > 1, by_batch=False, normalizes_residual=len(norms) > 1)
    # x in a single dtype, so that its gradient is rounded once.
    normed_neuron = with_batch_norm(definition, values, kind)
    outputs, finals = reference.scan(normed_neuron, xs, arguments.states)
    dtype = reduce(torch.promote_types, (x.dtype for x in inputs))
    return Results([y.to(dtype) for y in outputs], finals)


def _reference_values(norm: BatchNorm, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
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
    return x, (mean, scale, shift_of([Norm(None, norm.bias)], x))


def check_norms(
    norms: Sequence[BatchNorm], neuron: Neuron, x: Tensor, backend: str, alone: bool
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
