"""Sums and gathers over a process group, and the statistics of `SyncBatchNorm` in blocks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from spikefuse.block import batch_norm

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


def group_of(norm: nn.SyncBatchNorm) -> GroupCollectives | None:
    """The processes that share the statistics of a norm; None if there is only one."""
    if not dist.is_initialized():
        return None
    group: Any = norm.process_group or dist.group.WORLD
    return GroupCollectives(group) if dist.get_world_size(group) > 1 else None


batch_norm.group_of = group_of
