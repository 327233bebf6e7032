"""Outputs, gradients and states of ranks that share a sequence.

The loss of a job is the mean of its ranks' losses: what `DistributedDataParallel` and
`reduce_gradients` average belongs to it. So a loss that each rank computes from `mean_over_steps`
counts once, and so does the mean of losses that ranks have of steps of their own.
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
    """The mean over all steps, `[T_r, ...]` on each rank of `axis` to `[...]` on all of them."""
    check_axis(axis)
    part = torch.cat([y.sum(0, dtype=torch.float32).flatten(), y.new_full((1,), len(y)).float()])
    total: Tensor = _Sum.apply(part, axis.get_group())
    return (total[:-1] / total[-1]).view(y.shape[1:]).to(y.dtype)


def last_step(y: Tensor, axis: DeviceMesh) -> Tensor:
    """The last step of all, `[T_r, ...]` on each rank of `axis` to `[...]` on all of them."""
    check_axis(axis)
    # The others take part too, so that a backward pass comes through their layers.
    is_last = axis.get_local_rank() == axis.size() - 1
    return _Sum.apply(y[-1] * float(is_last), axis.get_group())


def gather_steps(y: Tensor, axis: DeviceMesh, num_steps: int | None = None) -> Tensor:
    """All steps, `[T_r, ...]` on each rank of `axis` to `[T, ...]` on all of them.

    Args:
        y: this rank's steps, as many as `steps_of` says.
        axis: over which time is shared.
        num_steps: T, or None to ask the ranks, which waits for the device.
    """
    check_axis(axis)
    if num_steps is None:
        count = torch.tensor(len(y), device=y.device)
        dist.all_reduce(count, group=axis.get_group())
        num_steps = int(count)
    mine = steps_of(num_steps, axis.get_local_rank(), axis.size())
    before, after = (
        y.new_zeros(mine.start, *y.shape[1:]),
        y.new_zeros(num_steps - mine.stop, *y.shape[1:]),
    )
    return _Sum.apply(torch.cat([before, y, after]), axis.get_group())


@torch.no_grad()
def reduce_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Average the gradients of `model` over all ranks of a mesh, or of one axis of it, in place.

    A parameter that has none counts as having zeros. `DistributedDataParallel` over all processes
    does the same, and does it during the backward pass.
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
        parts = flat.split([p.numel() for p in parameters])
        for p, part in zip(parameters, parts, strict=True):
            p.grad = part.view_as(p)


def carry_state(state: dict[str, States], axis: DeviceMesh) -> dict[str, States] | None:
    """The state after a sequence, for the `state=` of the one that continues it.

    Args:
        state: what a `Temporal` returned on this rank.
        axis: over which its time is shared.

    Returns:
        On the first rank the last one's state, without its graph; None on the others.
    """
    check_axis(axis)
    ranks, rank = dist.get_process_group_ranks(axis.get_group()), axis.get_local_rank()
    is_first, is_last = rank == 0, rank == len(ranks) - 1
    carried = {}
    for name, states in state.items():
        tensors = tuple(s.detach().contiguous() for s in states)
        if is_first and not is_last:
            tensors = tuple(torch.empty_like(s) for s in tensors)
        for s in tensors:
            if is_last and not is_first:
                dist.send(s, ranks[0], axis.get_group())
            elif is_first and not is_last:
                dist.recv(s, ranks[-1], axis.get_group())
        carried[name] = tensors
    return carried if is_first else None


class _Sum(torch.autograd.Function):
    """The sum over ranks. Each rank's loss depends on it, so backward sums their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None
