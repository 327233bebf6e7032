"""Batch norm, residual and neuron as one operation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from spikefuse import reference
from spikefuse.compiler import launch
from spikefuse.compiler.call import Call, call_of, spec
from spikefuse.compiler.program import kind_of, prepare, program
from spikefuse.kernels.norm import gradient_sums, move, normalization, revision, statistics
from spikefuse.kernels.place import Place
from spikefuse.neurons.definition import Outputs, States
from spikefuse.nn.neuron import Neuron, backend_of, calls, check, mark
from spikefuse.nn.normed import REVISION, VALUES, behind_norm

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


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

    Shapes: `x` and `residual` are `[T, B, C, ...]`, float32, bfloat16 or float16, in any layout;
    inside `Temporal` they are folded, as all tensors are. Others as in `Neuron`. Arithmetic is
    float32. `impl="reference"` is the eager loop, any device, also float64.

    Raises:
        TypeError, ValueError: wrong modules, shapes or dtypes.

    Source: Li et al., "Efficient and Accurate BPTT Training on GPU" folds norm and neuron into one
    kernel; Ioffe and Szegedy, "Batch Normalization", for the norm and its gradient.
    """

    def __init__(self, norm: _BatchNorm, neuron: Neuron) -> None:
        super().__init__()
        if type(norm) not in NORMS:
            raise TypeError(f"norm is a {type(norm).__name__}: expected one of torch's batch norms")
        if not isinstance(neuron, Neuron):
            raise TypeError(f"neuron is a {type(neuron).__name__}: expected a spikefuse.Neuron")
        self.norm, self.neuron = norm, neuron

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        *,
        state: States | None = None,
        return_state: bool = False,
        impl: str = "auto",
    ) -> Any:
        return normed(self.norm, self.neuron, x, residual, state, return_state, impl)


def normed(
    norm: _BatchNorm,
    neuron: Neuron,
    x: Tensor,
    residual: Tensor | None = None,
    state: States | None = None,
    return_state: bool = False,
    impl: str = "auto",
) -> Any:
    """`Block(norm, neuron)` on `x`."""
    inputs = (x,) if residual is None else (x, residual)
    return neuron.call(partial(_scan, norm, neuron), inputs, state, return_state, impl)


def _scan(
    norm: _BatchNorm,
    neuron: Neuron,
    inputs: tuple[Tensor, ...],
    state: States | None,
    impl: str,
    return_state: bool,
) -> tuple[Outputs, States]:
    backend = backend_of(inputs, impl)
    check(neuron, ("x", "residual")[: len(inputs)], inputs, state, backend)
    _check_norm(norm, neuron, inputs[0])
    if backend == "reference":
        return _reference(norm, neuron, inputs, state)
    if torch.compiler.is_compiling():
        u = _folded(norm, inputs[0])
        return neuron._scan((u if len(inputs) == 1 else u + inputs[1],), state, impl, return_state)
    launch.check(backend, inputs[0])
    chosen, own = kernels_of(neuron, backend, len(inputs) > 1, uses_batch(norm))
    function = _train if chosen.revises else _evaluate
    outputs, finals = function(norm, chosen, own, inputs, list(state or ()), return_state)
    mark(outputs, chosen.binary)
    return outputs, finals


def _check_norm(norm: _BatchNorm, neuron: Neuron, x: Tensor) -> None:
    if len(type(neuron).input_names) != 1:
        raise TypeError(f"{type(neuron).__name__} takes several inputs: a block gives it one")
    if x.ndim < 3 or x.shape[2] != norm.num_features:
        raise ValueError(
            f"x has shape {list(x.shape)}: expected [T, B, C, ...] with C = {norm.num_features}, "
            "the number of features of the norm"
        )
    if uses_batch(norm) and x.numel() == x.shape[2]:
        raise ValueError(
            f"x has shape {list(x.shape)}: one value per channel has no variance, so that batch "
            "norm can't be trained on it"
        )


def uses_batch(norm: _BatchNorm) -> bool:
    """Whether the norm uses the statistics of the batch."""
    return norm.training or norm.running_mean is None


def _folded(norm: nn.Module, x: Tensor) -> Tensor:
    """The norm itself, on a sequence."""
    y: Tensor = norm(x.flatten(0, 1)).unflatten(0, x.shape[:2])
    return y


def _reference(
    norm: _BatchNorm, neuron: Neuron, inputs: tuple[Tensor, ...], state: States | None
) -> tuple[Outputs, States]:
    x = inputs[0].to(torch.promote_types(inputs[0].dtype, torch.float32))
    if uses_batch(norm):
        variance, mean = torch.var_mean(x, [0, 1, *range(3, x.ndim)], correction=0)
        number = x.numel() / x.shape[2]
        with torch.no_grad():
            move(_running(norm), mean, variance * (number / (number - 1)), _momentum(norm))
    else:
        assert norm.running_mean is not None and norm.running_var is not None
        mean, variance = norm.running_mean, norm.running_var
    inverse = torch.rsqrt(variance + norm.eps)
    scale = inverse if norm.weight is None else inverse * norm.weight
    definition = behind_norm(neuron, mean, scale, _shift(norm, x), len(inputs) > 1)
    return reference.scan(definition, inputs, state)


def _shift(norm: _BatchNorm, x: Tensor) -> Tensor:
    if norm.bias is not None:
        return norm.bias
    return torch.zeros(norm.num_features, dtype=torch.float32, device=x.device)


Running = tuple[Tensor | None, Tensor | None, Tensor | None]


def _running(norm: _BatchNorm) -> Running:
    """The statistics that a call in training moves on."""
    if not (norm.training and norm.track_running_stats):
        return None, None, None
    return norm.running_mean, norm.running_var, norm.num_batches_tracked


def _momentum(norm: _BatchNorm) -> float:
    if norm.momentum is not None:
        return norm.momentum
    batches = norm.num_batches_tracked
    return 0.0 if batches is None else 1.0 / (1.0 + batches.item())  # a mean over all batches


@dataclass(frozen=True)
class _Kernels:
    """The program of a neuron behind a norm."""

    name: str
    #: For each output, whether it is sure to be 0 or 1.
    binary: tuple[bool, ...]
    num_states: int
    backend: str
    #: Whether the statistics are the batch's.
    revises: bool
    rebuilds: bool
    scalars: list[float]
    #: Of the tensors that are run-time values, in the order of the program.
    labels: tuple[str, ...]
    #: Of those among them that belong to the neuron, the names there.
    own: tuple[str, ...]

    def tensors(self, given: Mapping[str, Tensor], own: Sequence[Tensor]) -> list[Tensor]:
        """The program's tensors, from those of the norm and the neuron's own."""
        rest = iter(own)
        return [given[label] if label in given else next(rest) for label in self.labels]


def kernels_of(
    neuron: Neuron, backend: str, adds: bool, revises: bool
) -> tuple[_Kernels, list[Any]]:
    """The program, and the neuron's own tensors that it reads."""
    description = neuron.description()
    values = description.values()
    kinds = [value.ndim for value in values.values() if isinstance(value, Tensor)]
    key = f"block {backend} {adds} {revises} {kinds}"
    made = description.notes.get(key)
    if made is None:
        made = description.notes[key] = _make_kernels(neuron, backend, adds, revises)
    return made, [values[name] for name in made.own]


def _make_kernels(neuron: Neuron, backend: str, adds: bool, revises: bool) -> _Kernels:
    placeholder = torch.zeros(1)
    definition = behind_norm(neuron, placeholder, placeholder, placeholder, adds, revises)
    values, statics = definition.describe()
    kinds = tuple((name, kind_of(value)) for name, value in values.items())
    name, used = prepare(definition, backend, statics, kinds)
    labels = tuple(label for label in used if isinstance(values[label], Tensor))
    made = program(name)
    return _Kernels(
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
    kernels: _Kernels,
    own: list[Tensor],
    inputs: tuple[Tensor, ...],
    states: list[Tensor],
    return_state: bool,
) -> tuple[Outputs, States]:
    """With running statistics: the norm is an affine map."""
    assert norm.running_mean is not None and norm.running_var is not None
    scale = torch.rsqrt(norm.running_var + norm.eps)
    scale = scale if norm.weight is None else scale * norm.weight
    given = dict(zip(VALUES, (norm.running_mean, scale, _shift(norm, inputs[0])), strict=True))
    params = kernels.tensors(given, own)
    num_finals = kernels.num_states if return_state else 0
    return launch.run(
        kernels.name,
        len(kernels.binary),
        num_finals,
        list(inputs),
        states,
        params,
        kernels.scalars,
    )


def _train(
    norm: _BatchNorm,
    kernels: _Kernels,
    own: list[Tensor],
    inputs: tuple[Tensor, ...],
    states: list[Tensor],
    return_state: bool,
) -> tuple[Outputs, States]:
    """With the statistics of the batch."""
    x, weight, shift = inputs[0], norm.weight, _shift(norm, inputs[0])
    found, number, group = _statistics(norm, x, kernels.backend)
    call = call_of(kernels.name, spec(inputs))
    keeps = not kernels.rebuilds or _keeps_states(call)
    job = _Job(kernels, call, found, number, group, len(inputs), len(states), keeps, return_state)
    tensors = (*inputs, *states, weight, shift, *own)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        results = _apply(job, *tensors)
        outputs = results[: len(kernels.binary)]
        return tuple(outputs), tuple(results[len(kernels.binary) :])
    outputs, finals, _ = job.forward(inputs, states, shift, own, save=False)
    return tuple(outputs), tuple(finals)


def _keeps_states(call: Call) -> bool:
    sequence = calls.sequence
    if sequence is None:
        return False
    if not sequence.policy.keeps_states:
        before = sequence.rebuilt.get(sequence.current, 0)
        sequence.rebuilt[sequence.current] = before + call.num_stored_bytes
    return sequence.policy.keeps_states


def _statistics(
    norm: _BatchNorm, x: Tensor, backend: str
) -> tuple[Tensor, float | Tensor, Group | None]:
    """(what `statistics` returns, values per channel, the ranks that share them)."""
    number, group = x.numel() / x.shape[2], _group(norm)
    running, weight = _running(norm), norm.weight
    if group is None:
        momentum = _momentum(norm)
        found = statistics(x, weight, running, momentum, norm.eps, backend)
        return found, number, None
    found = statistics(x, None, (None, None, None), 0.0, norm.eps, backend)
    total = _combine(found, number, group)
    normalization(found, weight, norm.eps)
    unbiased = found[3] * (total / (total - 1))
    move(running, found[0], unbiased, _momentum(norm))
    return found, total, group


Group = dist.ProcessGroup
Tensors = Sequence[Tensor]


def _group(norm: _BatchNorm) -> Group | None:
    """The ranks over which a norm takes its statistics, if there are several."""
    if not (isinstance(norm, nn.SyncBatchNorm) and norm.training and dist.is_initialized()):
        return None
    group = norm.process_group or dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None


def _combine(statistics: Tensor, number: float, group: Group) -> Tensor:
    """Replace mean and variance by those over all ranks; returns the values per channel there."""
    own = torch.cat((statistics[0], statistics[3], statistics.new_full((1,), number)))
    gathered = own.new_empty(dist.get_world_size(group), own.numel())
    dist.all_gather_into_tensor(gathered, own, group)
    channels = statistics.shape[1]
    means, variances = gathered[:, :channels], gathered[:, channels:-1]
    numbers = gathered[:, -1:]
    total = numbers.sum()
    # About the first rank's mean, in case that means are large.
    shift = (numbers * (means - means[:1])).sum(0) / total
    statistics[0] = means[0] + shift
    inside = variances + (means - means[:1] - shift).square()
    statistics[3] = (numbers * inside).sum(0) / total
    return total


@dataclass(frozen=True)
class _Job:
    """One call in training."""

    kernels: _Kernels
    call: Call
    statistics: Tensor
    number: float | Tensor
    group: Group | None
    num_inputs: int
    num_states: int
    keeps_states: bool
    return_state: bool

    def params(self, shift: Tensor, own: Sequence[Tensor], revision: Sequence[Tensor]) -> Any:
        """The program's tensors; `revision` is read by the gradient of the input only."""
        mean, scale, _, _ = self.statistics.unbind(0)
        values = (mean, scale, shift, *(revision or (mean, mean)))
        return self.kernels.tensors(dict(zip((*VALUES, *REVISION), values, strict=True)), own)

    def forward(
        self,
        inputs: Sequence[Tensor],
        states: Sequence[Tensor],
        shift: Tensor,
        own: Any,
        save: bool,
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """(outputs, final states, stored states)."""
        params = self.params(shift, own, ())
        scalars = self.kernels.scalars
        return self.call.forward(inputs, states, params, scalars, save, self.return_state)

    def revision(
        self, scale_sums: Tensor, shift_sums: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
        """((offset, slope), gradient of the weight, gradient of the shift)."""
        layout, number = self.call.layout, self.number
        inner, channels = layout.channel_inner, layout.channels
        place = Place(layout.num_neurons // (inner * channels), channels, inner)
        offset, slope, by_weight, by_shift = gradient_sums(
            scale_sums, shift_sums, self.statistics, place, number, self.kernels.backend
        )
        if self.group is not None:
            everywhere = torch.stack((by_weight, by_shift))
            dist.all_reduce(everywhere, group=self.group)
            offset, slope = revision(everywhere[0], everywhere[1], self.statistics, number)
        return (offset, slope), by_weight, by_shift


class _Training(torch.autograd.Function):
    """Backward is two passes over x and the incoming gradient: the first sums over each channel
    what flows through its statistics, the second writes the gradient of x."""

    @staticmethod
    def forward(ctx: Any, job: _Job, *tensors: Tensor) -> tuple[Tensor, ...]:
        split, end = job.num_inputs, job.num_inputs + job.num_states
        inputs, states, (_, shift, *own) = tensors[:split], tensors[split:end], tensors[end:]
        save = job.keeps_states
        outputs, finals, saved = job.forward(inputs, states, shift, own, save)
        ctx.save_for_backward(*inputs, *states, shift, *own, *saved)
        ctx.set_materialize_grads(False)
        ctx.job, ctx.num_own = job, len(own)
        return (*outputs, *finals)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        job: _Job = ctx.job
        tensors, kernels, call = ctx.saved_tensors, job.kernels, job.call
        labels = kernels.labels
        split, end = job.num_inputs, job.num_inputs + job.num_states
        inputs, states = tensors[:split], tensors[split:end]
        shift, own = tensors[end], tensors[end + 1 : end + 1 + ctx.num_own]
        saved = tensors[end + 1 + ctx.num_own :]
        rebuild = not job.keeps_states and call.num_saved > 0
        saved = call.stored() if rebuild else saved
        results = grads[: len(kernels.binary)], grads[len(kernels.binary) :]
        _, *needs = ctx.needs_input_grad
        needs_inputs, needs_own = needs[:split], iter(needs[end + 2 :])
        sums = [n in VALUES[1:] or (n.startswith("neuron.") and next(needs_own)) for n in labels]

        params = job.params(shift, own, ())
        _, starts, totals = call.differentiate(
            inputs,
            states,
            params,
            kernels.scalars,
            saved,
            *results,
            [False] * split,
            sums,
            rebuild,
        )
        found = dict(zip(compress(labels, sums), totals, strict=True))
        revision, grad_weight, grad_shift = job.revision(*(found[n] for n in VALUES[1:]))
        grad_inputs: Iterator[Tensor | None] = iter(())
        if any(needs_inputs):
            params = job.params(shift, own, revision)
            written, _, _ = call.differentiate(
                inputs,
                states,
                params,
                kernels.scalars,
                saved,
                *results,
                needs_inputs,
                [False] * len(labels),
            )
            grad_inputs = iter(written)
        names = [n for n in labels if n.startswith("neuron.")]
        return (
            None,
            *(next(grad_inputs) if wanted else None for wanted in needs_inputs),
            *(g.to(s.dtype) for g, s in zip(starts, states, strict=True)),
            grad_weight.to(shift.dtype) if needs[end] else None,
            grad_shift.to(shift.dtype) if needs[end + 1] else None,
            *(
                call.layout.reduce_to(found[n], p).to(p.dtype) if n in found else None
                for n, p in zip(names, own, strict=True)
            ),
        )


# That of torch.autograd.Function first looks for transforms, which `launch.check` has refused.
_apply = super(torch.autograd.Function, _Training).apply
