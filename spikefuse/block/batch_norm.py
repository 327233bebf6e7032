"""Batch norm modules: their effective settings, and the statistics of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from spikefuse.kernels.running import Running, update_running_stats
from spikefuse.scan.state_passing import Collectives

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

# The name in PyTorch before 2.13 comes second.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def begin_gather(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """`x` of all k processes of a group, `[k, ...]`, valid once the work has been waited for."""
    flat = x.new_empty(group.size() * x.numel())
    work = _gather(flat, x.contiguous().view(-1), group=group, async_op=True)
    assert work is not None
    return flat.view(group.size(), *x.shape), work


class GroupCollectives:
    """Sums and gathers over a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def sum(self, x: Tensor) -> None:
        dist.all_reduce(x, group=self.group)

    def gather(self, x: Tensor) -> Tensor:
        rows, work = begin_gather(x, self.group)
        work.wait()
        return rows


def shift_of(norms: Sequence[_BatchNorm], x: Tensor) -> Tensor:
    """The sum of the norms' biases, or zeros."""
    shift: Tensor | None = None
    for norm in norms:
        if norm.bias is not None:
            shift = norm.bias if shift is None else shift + norm.bias
    if shift is not None:
        return shift
    return torch.zeros(norms[0].num_features, dtype=torch.float32, device=x.device)


def running_of(norm: _BatchNorm) -> Running:
    """The running statistics that a call updates."""
    if not (norm.training and norm.track_running_stats):
        return Running()
    batches, momentum = norm.num_batches_tracked, norm.momentum
    if momentum is None:  # a mean over all batches
        momentum = 0.0 if batches is None else 1.0 / (1.0 + batches.item())
    return Running(norm.running_mean, norm.running_var, batches, momentum)


def update_traced_stats(norm: _BatchNorm, mean: Tensor, unbiased: Tensor) -> None:
    """Update the running statistics of a norm in a traced graph."""
    with torch.no_grad():
        update_running_stats(running_of(norm), mean, unbiased)


def collectives_of(norm: nn.SyncBatchNorm) -> Collectives | None:
    """Of the group of a norm, if it has several processes."""
    if not (norm.training and dist.is_initialized()):
        return None
    group: Any = norm.process_group or dist.group.WORLD
    return GroupCollectives(group) if dist.get_world_size(group) > 1 else None


class CollectiveNorm(_BatchNorm):
    """A batch norm that itself takes its statistics over several processes."""

    is_leaf = True  # of traced graphs
