"""Per-channel reductions of a batch norm: batch statistics, and the sums its gradient needs."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from spikefuse.kernels.channels import ChannelLayout, channel_layout
from spikefuse.kernels.running import Running
from spikefuse.kernels.threads import import_module

#: The batch norms of PyTorch.
BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


@cache
def _kernels(backend: str) -> Any:
    if backend == "triton":
        return import_module("spikefuse.kernels.norm_triton")
    return import_module("spikefuse.kernels.norm_numba")


def by_batch(norm: BatchNorm) -> bool:
    """Whether the norm uses the statistics of the batch."""
    return norm.training or norm.running_mean is None


def statistics(
    x: Tensor, weight: Tensor | None, running: Running, eps: float, backend: str
) -> Tensor:
    """Compute the statistics of each channel over all other dimensions.

    Also updates the running statistics as `torch.nn.BatchNorm2d` does, with the unbiased variance.

    Args:
        x: `[T, B, C, ...]`, any dense layout or broadcast over time, float32 or half precision.
        weight: `[C]`, or None for 1.
        running: updated in place; the number of batches increases by 1.
        backend: "triton" or "numba".

    Returns:
        Float32 `[4, C]`: mean, `weight / sqrt(variance + eps)`, `1 / sqrt(variance + eps)` and the
        biased variance. Deterministic.
    """
    if not x.numel():  # as in PyTorch, running mean and variance do not change
        if running.batches is not None:
            running.batches.add_(1)
        return x.new_zeros((4, x.shape[2]), dtype=torch.float32)
    repeats = 1
    if x.stride(0) == 0:
        repeats, x = x.shape[0], x[:1]
    layout = channel_layout(x.shape, x.stride())
    if layout is None:
        x = x.contiguous()
        layout = channel_layout(x.shape, x.stride())
    return _kernels(backend).statistics(x, layout, repeats, weight, running, eps)


def merge_statistics(
    shares: Tensor, weight: Tensor | None, running: Running, eps: float, backend: str
) -> tuple[Tensor, Tensor]:
    """Merge the statistics of several shares of a batch.

    Args:
        shares: float32 `[k, 2C + 1]`; each row holds the means, the biased variances, and the
            number of values per channel. Other arguments are as in `statistics`.

    Returns:
        What `statistics` returns for the whole batch, and its number of values per channel, a
        float32 scalar.
    """
    return _kernels(backend).merge_statistics(shares, weight, running, eps)


def gradient_sums(
    scale_sums: Tensor,
    shift_sums: Tensor,
    statistics: Tensor,
    layout: ChannelLayout,
    number: float,
    backend: str,
) -> Tensor:
    """Reduce sums over time to the coefficients of a batch norm's gradient.

    With `u = (x - mean) * scale + shift` and G the gradient of u, the gradient of x in training
    is `G * scale + offset + slope * (x - mean)`. The last two terms flow through the statistics.

    Args:
        scale_sums, shift_sums: sums of `G * (x - mean)` and of `G`: with "triton" over time,
            float32, one per neuron, in the memory order of `layout`; with "numba" one per channel,
            float64.
        statistics: the result of `statistics`.
        number: values per channel. Ranks that share their statistics pass 1, add up their results,
            and divide offset and slope by the total number.
        backend: "triton" or "numba".

    Returns:
        Float32 `[4, C]`: offset, slope, gradient of the weight, gradient of the shift.
    """
    if not number:  # of values
        return torch.zeros_like(statistics)
    return _kernels(backend).gradient_sums(scale_sums, shift_sums, statistics, layout, number)
