"""Labelled images in memory.

Shape legend: N images, C channels, H rows, W columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Images:
    """Labelled images, kept as bytes.

    Args:
        pixels: uint8 `[N, C, H, W]`, 0 to 255.
        labels: int64 `[N]`.
    """

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor) -> Images:
        return Images(self.pixels[index], self.labels[index])

    def to(self, device: torch.device) -> Images:
        return Images(self.pixels.to(device), self.labels.to(device))


def split(images: Images, fraction: float, seed: int) -> tuple[Images, Images]:
    """Split into (rest, part), stratified: `part` holds `fraction` of every class.

    The result depends on the labels and `seed` only. Both keep the order of `images`.

    Args:
        images: what to split.
        fraction: share of every class that goes to `part`, rounded, in [0, 1].
        seed: seed of the choice.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction is {fraction}: expected a number from 0 to 1")
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.zeros(len(images), dtype=torch.bool)
    for label in images.labels.unique():
        members = (images.labels == label).nonzero().squeeze(1)
        order = torch.randperm(len(members), generator=generator)
        chosen[members[order[: round(fraction * len(members))]]] = True
    return images[~chosen], images[chosen]
