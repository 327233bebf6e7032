"""Augmentations of whole batches, on the device of the batch.

Examples are transformed independently, but all time steps and channels of an example alike. Batches
are `[B, ..., H, W]` of any dtype; for `[T, B, ...]` pass `x.transpose(0, 1)`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def random_shift(batch: Tensor, distance: int, generator: torch.Generator) -> Tensor:
    """Shift each example by up to `distance` pixels in both dimensions, filling with zeros.

    Equivalent to padding by `distance` and cropping at random, as usual for CIFAR-10 with 4.

    Source: Lee, Xie, Gallagher, Zhang, Tu, "Deeply-Supervised Nets", AISTATS 2015.

    Args:
        batch: `[B, ..., H, W]`.
        distance: largest shift; 0 returns `batch` itself.
        generator: random number generator on the device of `batch`.

    Raises:
        ValueError: `distance` is negative, or `batch` has fewer than three dimensions.
    """
    _check(batch)
    if distance < 0:
        raise ValueError(f"distance is {distance}: expected at least 0")
    if distance == 0:
        return batch
    num, height, width = batch.shape[0], batch.shape[-2], batch.shape[-1]
    device = batch.device
    planes = F.pad(batch.reshape(num, -1, height, width), (distance,) * 4)
    offsets = torch.randint(0, 2 * distance + 1, (2, num, 1), device=device, generator=generator)
    rows = offsets[0] + torch.arange(height, device=device)
    columns = offsets[1] + torch.arange(width, device=device)
    example = torch.arange(num, device=device).view(num, 1, 1, 1)
    plane = torch.arange(planes.shape[1], device=device).view(1, -1, 1, 1)
    moved = planes[example, plane, rows[:, None, :, None], columns[:, None, None, :]]
    return moved.view(batch.shape)


def random_flip(batch: Tensor, generator: torch.Generator, probability: float = 0.5) -> Tensor:
    """Mirror each example left to right with the given probability.

    Unsuitable for gestures and digits, whose meaning changes.

    Args:
        batch: `[B, ..., H, W]`.
        generator: random number generator on the device of `batch`.
        probability: probability of a flip, in [0, 1].

    Raises:
        ValueError: `probability` is out of range, or `batch` has fewer than three dimensions.
    """
    _check(batch)
    if not 0 <= probability <= 1:
        raise ValueError(f"probability is {probability}: expected a number from 0 to 1")
    draws = torch.rand(len(batch), device=batch.device, generator=generator)
    chosen = (draws < probability).view(-1, *[1] * (batch.ndim - 1))
    return torch.where(chosen, batch.flip(-1), batch)


def _check(batch: Tensor) -> None:
    if batch.ndim < 3:
        raise ValueError(f"batch has shape {list(batch.shape)}: expected [B, ..., H, W]")
