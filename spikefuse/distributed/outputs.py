"""Outputs, gradients and states of ranks that share a sequence.

The loss of a job is the mean of its ranks' losses, because `DistributedDataParallel` and
`reduce_gradients` average gradients. A loss that every rank computes from `mean_over_steps` thus
counts once, and so does the mean of losses that ranks compute from their own steps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spikefuse.distributed.mesh import check_axis, steps_of
from spikefuse.neurons.definition import States


def mean_over_steps(y: Tensor, axis: DeviceMesh) -> Tensor:
    """Return the mean over all steps: `[T_r, ...]` on each rank of `axis` to `[...]` on all.

    Sums are float32; the result has the dtype of `y`. Backward sums the gradients of all ranks.

    Args:
        y, axis: see `gather_steps`.

    Raises:
        ValueError: `axis` is not one axis of a mesh.
    """
    check_axis(axis)
    sums = torch.cat([y.sum(0, dtype=torch.float32).flatten(), y.new_full((1,), len(y)).float()])
    total: Tensor = _SumOverRanks.apply(sums, axis.get_group())
    return (total[:-1] / total[-1]).view(y.shape[1:]).to(y.dtype)


def last_step(y: Tensor, axis: DeviceMesh) -> Tensor:
    """Return the last step: `[T_r, ...]` on each rank of `axis` to `[...]` on all, in `y`'s dtype.

    Backward sums the gradients of all ranks.

    Args:
        y, axis: see `gather_steps`.

    Raises:
        ValueError: `axis` is not one axis of a mesh.
    """
    check_axis(axis)
    # All ranks take part, so that backward passes through their layers too.
    is_last = axis.get_local_rank() == axis.size() - 1
    return _SumOverRanks.apply(y[-1] * float(is_last), axis.get_group())


def gather_steps(y: Tensor, axis: DeviceMesh, num_steps: int | None = None) -> Tensor:
    """Return all steps: `[T_r, ...]` on each rank of `axis` to `[T, ...]` on all, in `y`'s dtype.

    Backward sums the gradients of all ranks.

    Args:
        y: this rank's steps `[T_r, ...]`, as many as `steps_of` assigns to it.
        axis: the ranks that share the sequence.
        num_steps: T; None sums the ranks' numbers of steps, for which the host waits.

    Raises:
        ValueError: `axis` is not one axis of a mesh.
    """
    check_axis(axis)
    if num_steps is None:
        count = torch.tensor(len(y), device=y.device)
        dist.all_reduce(count, group=axis.get_group())
        num_steps = int(count)
    mine = steps_of(num_steps, axis.get_local_rank(), axis.size())
    before = y.new_zeros(mine.start, *y.shape[1:])
    after = y.new_zeros(num_steps - mine.stop, *y.shape[1:])
    return _SumOverRanks.apply(torch.cat([before, y, after]), axis.get_group())


@torch.no_grad()
def reduce_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Average the gradients of `model` over all ranks of a mesh, or of one axis, in place.

    A missing gradient counts as zero. `DistributedDataParallel` over all processes computes the
    same averages during the backward pass.

    Args:
        model: a network whose backward pass is complete.
        mesh: the ranks; parameters are the same on all of them.
    """
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for p in model.parameters():
        if p.requires_grad:
            by_dtype.setdefault(p.dtype, []).append(p)
    for parameters in by_dtype.values():
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([g.flatten() for g in grads]) / mesh.size()
        for group in mesh.get_all_groups():
            if group.size() > 1:
                dist.all_reduce(flat, group=group)
        averages = flat.split([p.numel() for p in parameters])
        for p, average in zip(parameters, averages, strict=True):
            p.grad = average.view_as(p)


def carry_state(state: dict[str, States], axis: DeviceMesh) -> dict[str, States] | None:
    """Return the state after a sequence, to pass as `state=` with the sequence that continues it.

    Args:
        state: the state that a `Temporal` returned on this rank.
        axis: the ranks that share the sequence.

    Returns:
        The last rank's state, detached, on the first rank; None on the others.

    Raises:
        ValueError: `axis` is not one axis of a mesh.
    """
    check_axis(axis)
    group, rank, carried = axis.get_group(), axis.get_local_rank(), {}
    ranks = dist.get_process_group_ranks(group)
    receives, sends = (rank == end and len(ranks) > 1 for end in (0, len(ranks) - 1))
    for name, states in state.items():
        tensors = tuple(s.detach().contiguous() for s in states)
        if receives:
            tensors = tuple(torch.empty_like(s) for s in tensors)
        for s in tensors:
            if sends:
                dist.send(s, ranks[0], group)
            elif receives:
                dist.recv(s, ranks[-1], group)
        carried[name] = tensors
    return carried if rank == 0 else None


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks. Every rank's loss depends on the sum, so backward sums its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _SumOverRanks.apply(grad, ctx.group), None
