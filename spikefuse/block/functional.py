"""Batch norm and neuron as functions of tensors, which modules and passes over graphs call.

Called eagerly they run kernels at once. Under a tracer, such as AOTAutograd, they are ops of the
library: `spikefuse::norm_statistics` returns the results of `kernels.norm.statistics` and the
unbiased variance, and `spikefuse::block` runs a block in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spikefuse.block.batch_norm import Affine
from spikefuse.block.program import traits
from spikefuse.block.training import BlockCall
from spikefuse.kernels.norm import merge_statistics, statistics
from spikefuse.kernels.running import Running, update_running_stats
from spikefuse.kernels.threads import import_module
from spikefuse.neurons.checks import is_plain
from spikefuse.scan import op
from spikefuse.scan.execution import execution_of
from spikefuse.scan.kinds import CHANNEL, SCALAR
from spikefuse.scan.records import Arguments, Results, Wanted
from spikefuse.scan.state_passing import Collectives

op.library.define(
    "norm_statistics(Tensor x, Tensor? weight, float eps, str backend) -> (Tensor, Tensor)"
)


class Statistics(NamedTuple):
    """The statistics of a batch.

    Attributes:
        values: `[4, C]`, see `spikefuse.kernels.norm.statistics`.
        number: values per channel in all processes; None if no other process shares them.
    """

    values: Tensor
    number: Tensor | None = None


class Norm(NamedTuple):
    """A batch norm of a block.

    Attributes:
        statistics: of the batch.
        mean, variance: the running statistics, in evaluation; None if the norm only shifts.
    """

    weight: Tensor | None
    bias: Tensor | None
    eps: float = 0.0
    statistics: Statistics | None = None
    mean: Tensor | None = None
    variance: Tensor | None = None


def norm_statistics(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    running: Running,
    backend: str,
    collectives: Collectives | None = None,
) -> Statistics:
    """Take the statistics of `x`, `[T, B, C, ...]` or expanded along T, and update running ones.

    Args:
        running: updated in place; all None to leave them as they are.
        backend: "triton" or "numba".
        collectives: over the processes that share the statistics, if there are others.
    """
    if not is_plain((x,)):
        with torch.no_grad():
            weight = None if weight is None else weight.detach()
            found = torch.ops.spikefuse.norm_statistics(x.detach(), weight, eps, backend)
            update_running_stats(running, found[0][0], found[1])
        return Statistics(found[0])
    if collectives is None:
        return Statistics(statistics(x, weight, running, eps, backend))
    own = statistics(x, None, Running(), eps, backend)
    count = own.new_full((1,), x.numel() / x.shape[2])
    shares = collectives.gather(torch.cat((own[0], own[3], count)))
    return Statistics(*merge_statistics(shares, weight, running, eps, backend))


def compile_ahead(program: str, arguments: Arguments[Tensor], wanted: Wanted) -> None:
    """Begin to compile the forward kernel of a block on a thread, beside that of the statistics."""
    execution = execution_of(program, arguments.inputs)
    if execution.is_new and arguments.passing is None:
        unknown = [torch.empty(0, device="meta")] * len(execution.program.params(SCALAR, CHANNEL))
        execution.compile_forward(arguments._replace(params=unknown), wanted)


def run_block(
    program: str, arguments: Arguments[Tensor], norms: Sequence[Norm], wanted: Wanted
) -> Results[Tensor]:
    """Run norms and neuron as one, with gradients of all tensors.

    Args:
        program: from `prepare_block`.
        arguments: inputs `[T, B, C, ...]`, and the parameters of the neuron that the program reads.
        norms: of the first input, and perhaps of the residual.
    """
    by_batch, computes_scales, rebuilds, order = traits(program)
    inputs, states, own, _, scalars, passing = arguments
    wanted = wanted._replace(save=wanted.save or not rebuilds)
    if not by_batch:
        values: list[Any]
        if computes_scales:
            values = [x for n in norms for x in (n.mean, n.variance, n.weight, n.bias)]
        else:
            maps = [value for norm in norms for value in _mean_and_scale(norm)]
            values = [*maps[:2], shift_of(norms, inputs[0]), *maps[2:]]
        values += own
        params = [values[i] for i in order]
        return op.run(program, Arguments(inputs, states, params, (), scalars, passing), wanted)
    prologue, number = [shift_of(norms, inputs[0])], None
    for norm in norms:
        assert norm.statistics is not None
        prologue.append(norm.statistics.values)
        number = norm.statistics.number
    for norm in norms:
        if norm.weight is not None:
            prologue.append(norm.weight)
    call = BlockCall(program, scalars, passing, number)
    return op.execute(call, arguments._replace(prologue=prologue), wanted)


def shift_of(norms: Sequence[Norm], x: Tensor) -> Tensor:
    """The sum of the norms' biases, or zeros."""
    shift: Tensor | None = None
    for norm in norms:
        if norm.bias is not None:
            bias = norm.bias.to(torch.float32)
            shift = bias if shift is None else shift + bias
    return x.new_zeros(x.shape[2], dtype=torch.float32) if shift is None else shift


def _mean_and_scale(norm: Norm) -> tuple[()] | tuple[Tensor, Tensor]:
    """The affine map that a norm is with running statistics, without its shift."""
    mean, variance = norm.mean, norm.variance
    if mean is None or variance is None:
        return ()
    if torch.is_grad_enabled():  # backward may follow a call in training, which updates the mean
        mean = mean.clone()
    # Rounded as in training; `rsqrt` is an approximation on a GPU.
    scale = torch.sqrt(variance.to(torch.float32) + norm.eps).reciprocal()
    return mean, scale if norm.weight is None else scale * norm.weight


def eps_of_step(backend: str, norms: Sequence[Affine]) -> tuple[float, ...]:
    """`Kind.eps` of norms with running statistics: of all if a step computes the scales.

    On a GPU, each operation on one value per channel is a launch, which takes longer than a step of
    a small network. Gradients of the scales are sums over neurons, so with gradients the scales
    are computed outside.
    """
    if backend != "triton" or torch.is_grad_enabled():
        return ()
    if any(weight is None or bias is None for weight, bias, _ in norms):
        return ()
    return tuple(float(eps) for *_, eps in norms)


def reserve_counters(backend: str, device: torch.device) -> None:
    """Prepare the kernels of blocks for graphs, before Inductor records one."""
    if backend == "triton":
        import_module("spikefuse.kernels.norm_triton").reserve_counters(device)


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


op.implement("norm_statistics", _statistics, _statistics_fake)
