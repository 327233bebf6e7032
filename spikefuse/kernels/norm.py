"""Per-channel reductions of a batch norm: batch statistics, and the sums its gradient needs."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from spikefuse.kernels.channels import ChannelLayout, channel_layout

#: Running mean and variance `[C]`, and the number of batches; None where they are not tracked.
Running = tuple[Tensor | None, Tensor | None, Tensor | None]


@cache
def _triton() -> Any:
    from spikefuse.kernels import norm_triton

    return norm_triton


def by_batch(norm: _BatchNorm) -> bool:
    """Whether the norm uses the statistics of the batch."""
    return norm.training or norm.running_mean is None


def statistics(
    x: Tensor, weight: Tensor | None, running: Running, momentum: float, eps: float, backend: str
) -> Tensor:
    """Compute the statistics of each channel over all other dimensions.

    Also updates the running statistics as `torch.nn.BatchNorm2d` does:
    `(1 - momentum) * old + momentum * new`, with the unbiased variance.

    Args:
        x: `[T, B, C, ...]`, any dense layout or broadcast over time, float32 or half precision.
        weight: `[C]`, or None for 1.
        running: updated in place; the number of batches increases by 1.
        backend: "triton" or "numba".

    Returns:
        Float32 `[4, C]`: mean, `weight / sqrt(variance + eps)`, `1 / sqrt(variance + eps)` and the
        biased variance. Deterministic.
    """
    repeats = 1
    if x.stride(0) == 0:
        repeats, x = x.shape[0], x[:1]
    x, layout = channel_layout(x, 2)
    if backend == "triton":
        return _triton().statistics(x, layout, repeats, weight, running, (momentum, eps))
    from spikefuse.kernels.norm_numba import moments

    results = torch.empty((4, layout.channels), dtype=torch.float32)
    moments(x, *layout, results[0], results[3])
    number = repeats * layout.outer * layout.inner
    # The only value of a process that shares its statistics with others.
    correction = number / max(number - 1, 1)
    _finish(results, weight, running, correction, (momentum, eps))
    return results


def merge_statistics(
    shares: Tensor,
    weight: Tensor | None,
    running: Running,
    momentum: float,
    eps: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Merge the statistics of several shares of a batch.

    Args:
        shares: float32 `[k, 2C + 1]`; each row holds the means, the biased variances, and the
            number of values per channel. Other arguments are as in `statistics`.

    Returns:
        What `statistics` returns for the whole batch, and its number of values per channel, a
        float32 scalar.
    """
    if backend == "triton":
        return _triton().merge_statistics(shares, weight, running, (momentum, eps))
    channels = shares.shape[1] // 2
    means, variances, numbers = shares.split([channels, channels, 1], 1)
    number = numbers.sum()
    results = torch.empty((4, channels), dtype=torch.float32)
    # Deviations from the first mean lose no precision where means are large.
    shift = (numbers * (means - means[:1])).sum(0) / number
    results[0] = means[0] + shift
    spread = variances + (means - means[:1] - shift).square()
    results[3] = (numbers * spread).sum(0) / number
    _finish(results, weight, running, number / (number - 1), (momentum, eps))
    return results, number


def _finish(
    results: Tensor,
    weight: Tensor | None,
    running: Running,
    correction: float | Tensor,
    numbers: tuple[float, float],
) -> None:
    """Fill rows 1 and 2 of the results and update the running statistics.

    Args:
        correction: unbiased over biased variance.
        numbers: momentum and eps.
    """
    mean, scale, inverse, variance = results
    momentum, eps = numbers
    torch.rsqrt(variance + eps, out=inverse)
    torch.mul(inverse, 1.0 if weight is None else weight.detach(), out=scale)
    update_running_stats(running, mean, variance * correction, momentum)


def update_running_stats(running: Running, mean: Tensor, unbiased: Tensor, momentum: float) -> None:
    """Update running statistics in place; see `statistics`."""
    running_mean, running_variance, batches = running
    if running_mean is not None and running_variance is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_variance.lerp_(unbiased.to(running_variance.dtype), momentum)
    if batches is not None:
        batches += 1


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
    if backend == "triton":
        return _triton().gradient_sums(scale_sums, shift_sums, statistics, layout, number)
    grad_weight, share = scale_sums * statistics[2], -statistics[1] / number
    offset, slope = share * shift_sums, share * statistics[2] * grad_weight
    return torch.stack((offset, slope, grad_weight, shift_sums)).float()
