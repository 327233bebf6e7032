"""Augmentations of whole batches, on the device where they lie.

Each example draws for itself, from one seeded generator; all time steps and channels of an example
move together. Batches are `[B, ..., H, W]` of any dtype; for `[T, B, ...]` pass
`x.transpose(0, 1)`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def random_shift(batch: Tensor, distance: int, generator: torch.Generator) -> Tensor:
    """Move each example by up to `distance` pixels both ways, filling with zeros.

    The same as padding by `distance` and cropping to the old size at a random place, the usual
    augmentation of CIFAR-10, with 4.

    Source: Lee, Xie, Gallagher, Zhang, Tu, "Deeply-Supervised Nets", AISTATS 2015.

    Args:
        batch: `[B, ..., H, W]`.
        distance: largest move; 0 returns `batch` itself.
        generator: source of the moves, on the device of `batch`.

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

    Not for gestures or digits, which mean something else in a mirror.

    Args:
        batch: `[B, ..., H, W]`.
        generator: source of the choices, on the device of `batch`.
        probability: of a flip, in [0, 1].

    Raises:
        ValueError: `probability` is no such number, or `batch` has fewer than three dimensions.
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
