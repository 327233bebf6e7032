"""The running statistics of a batch norm."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Running(NamedTuple):
    """Running mean and variance `[C]`, and the number of batches; None where they are not tracked.
    An update is `(1 - momentum) * old + momentum * new`."""

    mean: Tensor | None = None
    variance: Tensor | None = None
    batches: Tensor | None = None
    momentum: float = 0.0


def update_running_stats(running: Running, mean: Tensor, unbiased: Tensor) -> None:
    """Update running statistics in place."""
    running_mean, running_variance, batches, momentum = running
    if running_mean is not None and running_variance is not None:
        # As in PyTorch, autograd does not count this as a change: a norm outside a block saves
        # running statistics that its backward does not read.
        running_mean.data.lerp_(mean.to(running_mean.dtype), momentum)
        running_variance.data.lerp_(unbiased.to(running_variance.dtype), momentum)
    if batches is not None:
        batches += 1
