"""Batch norm modules: their settings, and the processes that share their statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from spikefuse.kernels.running import Running
from spikefuse.scan.state_passing import WHOLE, Collectives, StatePassing

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

#: Returns the processes that share the statistics of a norm, None if there is only one.
#: `spikefuse.distributed` assigns it: this package knows no processes.
group_of: Callable[[nn.SyncBatchNorm], Collectives | None] | None = None


def state_passing_of(norm: _BatchNorm, passing: StatePassing | None) -> StatePassing | None:
    """The state passing of a block, whose norm may have its own processes."""
    if not (norm.training and isinstance(norm, nn.SyncBatchNorm)) or group_of is None:
        return passing
    collectives = group_of(norm)
    if passing is None and collectives is None:
        return None
    passing = copy.copy(passing or WHOLE)
    passing.statistics = collectives
    return passing


def running_of(norm: _BatchNorm) -> Running:
    """The running statistics that a call updates."""
    if not (norm.training and norm.track_running_stats):
        return Running()
    batches, momentum = norm.num_batches_tracked, norm.momentum
    if momentum is None:  # a mean over all batches
        momentum = 0.0 if batches is None else 1.0 / (1.0 + batches.item())
    return Running(norm.running_mean, norm.running_var, batches, momentum)
