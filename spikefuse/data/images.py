"""Labelled images and series in memory, and the protocol of all datasets.

Shape legend: N examples, T time steps, C channels, H rows, W columns, K values of a target.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from spikefuse.data.files import DataError

# Rows of a dataset: a slice, int64 positions or a bool mask.
Index = Tensor | slice


class Examples(Protocol):
    """Labelled examples, in memory or read when they are indexed.

    Indexing returns a batch, `Images`, `Frames` or `Series` in memory, in the compact form in which
    it is copied to a device. `data.expand(batch)` converts it to a network's input there.
    """

    @property
    def labels(self) -> Tensor:
        """Classes int64 `[N]`, or targets of another task, always in memory."""

    @property
    def pixels(self) -> Tensor:
        """All examples, decoded: uint8 `[N, C, H, W]`, or `[N, T, ...]` for events and series."""

    @property
    def nbytes(self) -> int:
        """Number of bytes that `to(device)` copies."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Index) -> Examples: ...

    def to(self, device: torch.device, non_blocking: bool = False) -> Examples:
        """Return all examples on `device`, including those that are read lazily."""


def check_lengths(name: str, values: Tensor, labels: Tensor) -> None:
    """Raise DataError unless there is a label for each example."""
    if labels.ndim == 0 or len(values) != len(labels):
        raise DataError(
            f"labels are {list(labels.shape)} for {len(values)} examples ({name} "
            f"{list(values.shape)}): expected one label for each"
        )


def check_index(index: Any) -> None:
    """Raise TypeError if an index is a single position, whose example would not be a batch."""
    if not isinstance(index, slice) and np.ndim(index) == 0:
        raise TypeError(f"the index is {index!r}: index with a slice, rows or a mask")


@dataclass(frozen=True)
class InMemory:
    """Examples in the tensors of a dataclass, which have a row for each example."""

    def __len__(self) -> int:
        return len(self._tensors()["labels"])

    def __getitem__(self, index: Index) -> Self:
        check_index(index)
        return replace(self, **{name: x[index] for name, x in self._tensors().items()})

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self._tensors().values())

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        tensors = self._tensors().items()
        return replace(self, **{n: x.to(device, non_blocking=non_blocking) for n, x in tensors})

    def _tensors(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if hasattr(x, "nbytes")}


@dataclass(frozen=True)
class Images(InMemory):
    """Labelled images as bytes.

    Example::

        pixels = torch.randint(256, (100, 3, 32, 32), dtype=torch.uint8)
        images = sf.data.Images(pixels, torch.randint(10, (100,)))
        batch = images[:32]

    Args:
        pixels: uint8 `[N, C, H, W]`, 0 to 255.
        labels: classes int64 `[N]`, or values float32 `[N, K]`; with a target for each time step,
            `[N, T]` or `[N, T, K]`.

    Raises:
        DataError: they differ in number, or the pixels are not bytes.
    """

    pixels: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        check_lengths("pixels", self.pixels, self.labels)
        if self.pixels.dtype != torch.uint8:  # `data.expand` divides them by 255
            raise DataError(
                f"pixels are {self.pixels.dtype}: expected bytes, torch.uint8, from 0 to 255; a "
                "network gets the values of a Series as they are"
            )


@dataclass(frozen=True)
class Series(Images):
    """Sequences of values with targets, such as time series.

    Example::

        t = torch.linspace(0, 6.28, 50)
        phases = 6.28 * torch.rand(100, 1)
        waves = sf.data.Series(torch.sin(t + phases)[..., None], phases)  # [100, 50, 1], [100, 1]

    Args:
        pixels: float32 `[N, T, ...]`, the input of a network without any scaling.
        labels: as of `Images`.
    """

    def __post_init__(self) -> None:
        check_lengths("pixels", self.pixels, self.labels)


@dataclass(frozen=True)
class Subset:
    """Rows of a larger dataset, which is read when they are indexed.

    Example::

        train, _ = sf.data.load("digits")
        zeros = sf.data.Subset(train, (train.labels == 0).nonzero().squeeze(1))

    Args:
        whole: the larger dataset.
        rows: positions in `whole`, int64 `[N]`.
    """

    whole: Examples
    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Index) -> Examples:
        check_index(index)
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
    """Split into (rest, part), stratified by class; both preserve the order of `images`.

    If the fraction of every class rounds to no example, or labels are no classes, the part is drawn
    from all examples.

    The result depends only on the labels and `seed`. Datasets other than `Images` are not read, but
    split into `Subset`s.

    Example::

        train, test = sf.data.load("digits")
        train, valid = sf.data.split(train, fraction=0.1, seed=0)

    Args:
        images: the dataset.
        fraction: fraction of every class in `part`, rounded, in [0, 1].
        seed: seed of the random choice.
    """
    chosen = draw(images.labels, fraction, seed)
    if isinstance(images, Images):
        return images[~chosen], images[chosen]
    rest, part = (mask.nonzero().squeeze(1) for mask in (~chosen, chosen))
    return Subset(images, rest), Subset(images, part)


def draw(labels: Tensor, fraction: float, seed: int) -> Tensor:
    """Draw the part of `split`, bool `[N]`."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction is {fraction}: expected a number from 0 to 1")
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    are_classes = labels.ndim == 1 and not labels.is_floating_point()
    for label in labels.unique() if are_classes else ():
        members = (labels == label).nonzero().squeeze(1)
        order = torch.randperm(len(members), generator=generator)
        chosen[members[order[: round(fraction * len(members))]]] = True
    if not chosen.any():
        order = torch.randperm(len(labels), generator=generator)
        chosen[order[: round(fraction * len(labels))]] = True
    return chosen
