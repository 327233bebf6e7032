"""Labelled images in memory, and what every set of labelled examples can do.

Shape legend: N images, C channels, H rows, W columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# Rows of a set: a slice, int64 positions or a bool mask.
Index = Tensor | slice


class Examples(Protocol):
    """Labelled examples, in memory or read when they are indexed.

    Indexing gives a batch: `Images` or `Frames` in memory, as the bytes that travel to a device.
    `data.expand(batch)` makes them a network's input there.
    """

    @property
    def labels(self) -> Tensor:
        """int64 `[N]`, always in memory."""

    @property
    def pixels(self) -> Tensor:
        """uint8 `[N, C, H, W]`, or `[N, T, ...]` for events: all examples, decoded."""

    @property
    def nbytes(self) -> int:
        """Bytes that `to(device)` moves."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Index) -> Examples: ...

    def to(self, device: torch.device, non_blocking: bool = False) -> Examples:
        """All examples on `device`, those that are read lazily included."""


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

    def __getitem__(self, index: Index) -> Images:
        return Images(self.pixels[index], self.labels[index])

    @property
    def nbytes(self) -> int:
        return self.pixels.nbytes + self.labels.nbytes

    def to(self, device: torch.device, non_blocking: bool = False) -> Images:
        return Images(
            self.pixels.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )


@dataclass(frozen=True)
class Subset:
    """Some rows of a larger set, which is read only where it is indexed.

    Args:
        whole: the larger set.
        rows: int64 positions in `whole`.
    """

    whole: Examples
    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Index) -> Examples:
        if isinstance(index, Tensor):
            index = index.to(self.rows.device)
        return self.whole[self.rows[index]]

    @property
    def labels(self) -> Tensor:
        return self.whole.labels[self.rows]

    @property
    def pixels(self) -> Tensor:
        return self[:].pixels

    @property
    def nbytes(self) -> int:
        return self.whole.nbytes * len(self.rows) // max(len(self.whole), 1)

    def to(self, device: torch.device, non_blocking: bool = False) -> Examples:
        return self[:].to(device, non_blocking)


def split(images: Examples, fraction: float, seed: int) -> tuple[Examples, Examples]:
    """Split into (rest, part), stratified: `part` holds `fraction` of every class.

    The result depends on the labels and `seed` only. Both keep the order of `images`. What is
    not `Images` is not read: the parts are `Subset`s.

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
    if isinstance(images, Images):
        return images[~chosen], images[chosen]
    rest, part = (mask.nonzero().squeeze(1) for mask in (~chosen, chosen))
    return Subset(images, rest), Subset(images, part)
