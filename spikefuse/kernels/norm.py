"""Sums over each channel: the statistics of a batch norm, and what its gradient needs of them."""

from __future__ import annotations

import torch
from torch import Tensor

from spikefuse.kernels.place import Place, placed


def statistics(
    x: Tensor,
    weight: Tensor | None,
    running: tuple[Tensor | None, Tensor | None, Tensor | None],
    momentum: float,
    eps: float,
    backend: str,
) -> Tensor:
    """Mean and deviation of each channel, over all other dims.

    Also moves running statistics on: `(1 - momentum) * old + momentum * new`, of the variance the
    unbiased one, as `torch.nn.BatchNorm2d` does.

    Args:
        x: `[T, B, C, ...]`, any dense layout or broadcast over time, float32 or half precision.
        weight: `[C]`, or None for 1.
        running: mean and variance `[C]`, and the number of batches, one more after the call.
        backend: "triton" or "numba".

    Returns:
        Float32 `[4, C]`: mean, `weight / sqrt(variance + eps)`, `1 / sqrt(variance + eps)` and the
        biased variance. Equal calls give equal bits.
    """
    repeats = 1
    if x.stride(0) == 0:
        repeats, x = x.shape[0], x[:1]
    x, place = placed(x, 2)
    if backend == "triton":
        from spikefuse.kernels import norm_triton

        return norm_triton.run_statistics(x, place, repeats, weight, running, momentum, eps)
    from spikefuse.kernels.norm_numba import moments

    results = torch.empty((4, place.channels), dtype=torch.float32)
    mean, variance = results[0], results[3]
    moments(x, *place, mean, variance)
    normalization(results, weight, eps)
    number = repeats * place.outer * place.inner
    move(running, mean, variance * (number / (number - 1)), momentum)
    return results


def merged(
    shares: Tensor,
    weight: Tensor | None,
    running: tuple[Tensor | None, Tensor | None, Tensor | None],
    momentum: float,
    eps: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """The statistics of several shares as those of one batch.

    Args:
        shares: float32 `[k, 2C + 1]`: of each the means, the biased variances, and the number of
            values per channel. The rest is as in `statistics`.

    Returns:
        What `statistics` returns, of all shares, and the number of values per channel in all, a
        float32 scalar.
    """
    if backend == "triton":
        from spikefuse.kernels import norm_triton

        return norm_triton.run_merged(shares, weight, running, momentum, eps)
    channels = shares.shape[1] // 2
    means, variances, numbers = shares.split([channels, channels, 1], 1)
    number = numbers.sum()
    results = torch.empty((4, channels), dtype=torch.float32)
    # About the first mean, in case that means are large.
    shift = (numbers * (means - means[:1])).sum(0) / number
    results[0] = means[0] + shift
    inside = variances + (means - means[:1] - shift).square()
    results[3] = (numbers * inside).sum(0) / number
    normalization(results, weight, eps)
    move(running, results[0], results[3] * (number / (number - 1)), momentum)
    return results, number


def normalization(results: Tensor, weight: Tensor | None, eps: float) -> None:
    """Fill rows 1 and 2 of what `statistics` returns from its row 3."""
    torch.rsqrt(results[3] + eps, out=results[2])
    if weight is None:
        results[1].copy_(results[2])
    else:
        torch.mul(results[2], weight.detach(), out=results[1])


def move(
    running: tuple[Tensor | None, Tensor | None, Tensor | None],
    mean: Tensor,
    unbiased: Tensor,
    momentum: float,
) -> None:
    """Move running statistics on; see `statistics`."""
    running_mean, running_variance, batches = running
    if running_mean is not None and running_variance is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_variance.lerp_(unbiased.to(running_variance.dtype), momentum)
    if batches is not None:
        batches += 1


def gradient_sums(
    scale_sums: Tensor,
    shift_sums: Tensor,
    normalization: Tensor,
    place: Place,
    number: float,
    backend: str,
) -> Tensor:
    """What the gradient of a batch norm needs.

    With `u = (x - mean) * scale + shift` and G the gradient of u, the gradient of x in training
    is `G * scale + offset + slope * (x - mean)`; its last two terms flow through the statistics.

    Args:
        scale_sums, shift_sums: sums of `G * (x - mean)` and of `G` over time, float32, one per
            neuron, in memory as `place` tells.
        normalization: what `statistics` returned.
        number: values per channel. Of ranks that share their statistics the numbers and the sums
            add up: offset and slope with 1 for a number do, too, and are divided in the end.
        backend: "triton" or "numba".

    Returns:
        Float32 `[4, C]`: offset, slope, gradient of the weight, gradient of the shift.
    """
    if backend == "triton":
        from spikefuse.kernels import norm_triton

        return norm_triton.run_gradient_sums(scale_sums, shift_sums, normalization, place, number)
    by_weight = scale_sums.view(place).sum((0, 2)) * normalization[2]
    by_shift = shift_sums.view(place).sum((0, 2))
    share = -normalization[1] / number
    return torch.stack(
        (share * by_shift, share * normalization[2] * by_weight, by_weight, by_shift)
    )
