"""Batch norm modules: their settings, and the processes that share their statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch.nn.functional as F
from torch import Tensor, nn

from spikefuse.kernels.norm import BatchNorm
from spikefuse.kernels.running import Running
from spikefuse.neurons.checks import PLAIN
from spikefuse.scan.checks import call_untraced
from spikefuse.scan.state_passing import WHOLE, Collectives, StatePassing

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

#: Weight, bias and eps of a batch norm.
Affine = tuple[Tensor | None, Tensor | None, float]

# `spikefuse.distributed` assigns these functions: this package knows no processes.
#: Returns the processes that share the statistics of a norm, None if there is only one.
group_of: Callable[[nn.SyncBatchNorm], Collectives | None] | None = None
#: Returns a norm with the same tensors that TorchDynamo can trace.
traceable: Callable[[nn.SyncBatchNorm], nn.SyncBatchNorm] | None = None
#: Normalizes by the statistics of all processes, by which it updates running statistics.
normalize: Callable[[Tensor, Running, Affine, Collectives | None], Tensor] | None = None

#: The norms that have processes of their own and are in captured graphs, by id.
synchronized: WeakValueDictionary[int, nn.SyncBatchNorm] = WeakValueDictionary()


def synchronized_batch_norm(x: Tensor, *given: Any, norm: int) -> Tensor:
    """`F.batch_norm` in training, with the statistics of the processes of a norm in `synchronized`.
    TorchDynamo does not trace it."""
    if type(x) not in PLAIN:  # TorchDynamo asks for the shape of the result
        return F.batch_norm(x, *given)
    assert normalize is not None and group_of is not None
    mean, variance, weight, bias, _, momentum, eps = given
    running, group = Running(mean, variance, None, momentum), group_of(synchronized[norm])
    return call_untraced(normalize, x, running, (weight, bias, eps), group)


def state_passing_of(norm: BatchNorm, passing: StatePassing | None) -> StatePassing | None:
    """The state passing of a block, whose norm may have its own processes."""
    if not (norm.training and isinstance(norm, nn.SyncBatchNorm)) or group_of is None:
        return passing
    collectives = group_of(norm)
    if passing is None and collectives is None:
        return None
    passing = copy.copy(passing or WHOLE)
    passing.statistics = collectives
    return passing


def running_of(norm: BatchNorm) -> Running:
    """The running statistics that a call updates."""
    if not (norm.training and norm.track_running_stats):
        return Running()
    batches, momentum = norm.num_batches_tracked, norm.momentum
    if momentum is None:  # a mean over all batches
        momentum = 0.0 if batches is None else 1.0 / (1.0 + batches.item())
    return Running(norm.running_mean, norm.running_var, batches, momentum)
