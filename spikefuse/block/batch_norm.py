"""Batch norm modules: what their attributes stand for, and the statistics of a batch."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from spikefuse.kernels.norm import merged, statistics

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
Running = tuple[Tensor | None, Tensor | None, Tensor | None]


# Of an older PyTorch, by its name there.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def begin_gather(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """`[k, ...]`, the tensors of all ranks of a group, once the work is waited for."""
    flat = x.new_empty(group.size() * x.numel())
    work = _gather(flat, x.contiguous().view(-1), group=group, async_op=True)
    assert work is not None
    return flat.view(group.size(), *x.shape), work


class Ranks(Protocol):
    """Processes that share the statistics of a norm; `spikefuse.distributed.links` has those of a
    sequence, each with some of its steps."""

    def sum(self, x: Tensor) -> None:
        """Replace `x` by the sum of all ranks'."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Those of all ranks, `[k, ...]`."""
        ...


class RankedNorm(_BatchNorm):
    """A batch norm module that by itself takes its statistics over several processes;
    `spikefuse.distributed.sync_norm` has one."""

    is_leaf = True  # of traced graphs


class GroupRanks:
    """The ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def sum(self, x: Tensor) -> None:
        dist.all_reduce(x, group=self.group)

    def gather(self, x: Tensor) -> Tensor:
        rows, work = begin_gather(x, self.group)
        work.wait()
        return rows


def by_batch(norm: _BatchNorm) -> bool:
    """Whether the norm uses the statistics of the batch."""
    return norm.training or norm.running_mean is None


def shift_of(norm: _BatchNorm, x: Tensor) -> Tensor:
    shift = norm.bias
    if shift is not None:
        return shift
    return torch.zeros(norm.num_features, dtype=torch.float32, device=x.device)


def running_of(norm: _BatchNorm) -> Running:
    """The statistics that a call in training moves on."""
    if not (norm.training and norm.track_running_stats):
        return None, None, None
    buffers = norm._buffers
    try:  # of the attributes of a module, those that are found last
        return buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"]
    except KeyError:
        return norm.running_mean, norm.running_var, norm.num_batches_tracked


def momentum_of(norm: _BatchNorm) -> float:
    momentum = norm.momentum
    if momentum is not None:
        return momentum
    batches = norm.num_batches_tracked
    return 0.0 if batches is None else 1.0 / (1.0 + batches.item())  # a mean over all batches


def batch_statistics(
    norm: _BatchNorm, x: Tensor, backend: str, ranks: Ranks | None = None
) -> tuple[Tensor, float | Tensor, Ranks | None]:
    """(what `statistics` returns, values per channel, the ranks that share them).

    Args:
        ranks: those that share all statistics; a `SyncBatchNorm` has ranks of its own.
    """
    number = x.numel() / x.shape[2]
    ranks = _own_ranks(norm) if isinstance(norm, nn.SyncBatchNorm) else ranks
    running, weight = running_of(norm), norm.weight
    if ranks is None:
        momentum = momentum_of(norm)
        found = statistics(x, weight, running, momentum, norm.eps, backend)
        return found, number, None
    own = statistics(x, None, (None, None, None), 0.0, norm.eps, backend)
    share = torch.cat((own[0], own[3], own.new_full((1,), number)))
    rest = weight, running, momentum_of(norm), norm.eps, backend
    return *merged(ranks.gather(share), *rest), ranks


def _own_ranks(norm: nn.SyncBatchNorm) -> Ranks | None:
    """The ranks over which a norm takes its statistics, if there are several."""
    if not (norm.training and dist.is_initialized()):
        return None
    group: Any = norm.process_group or dist.group.WORLD
    return GroupRanks(group) if dist.get_world_size(group) > 1 else None
