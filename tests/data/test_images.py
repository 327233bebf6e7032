"""Splits are stratified, disjoint and a function of the seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from spikefuse.data import DataError, ImageFolder, Images, Series, Subset, expand, split
from spikefuse.data.frames import Frames


def numbered(labels: torch.Tensor) -> Images:
    """Images whose single pixel is their own index."""
    pixels = torch.arange(len(labels), dtype=torch.uint8).view(-1, 1, 1, 1)
    return Images(pixels, labels)


def test_split_is_stratified_and_complete() -> None:
    images = numbered(torch.arange(200) % 10 % 7)
    rest, part = split(images, 0.25, seed=3)
    for label in range(7):
        members = int((images.labels == label).sum())
        assert int((part.labels == label).sum()) == round(0.25 * members)
    both = torch.cat([rest.pixels, part.pixels]).flatten()
    assert both.sort().values.tolist() == list(range(200))
    assert part.pixels.flatten().tolist() == sorted(part.pixels.flatten().tolist())


def test_split_depends_on_the_seed_alone() -> None:
    images = numbered(torch.arange(200) % 10)
    torch.manual_seed(1)
    first = split(images, 0.2, seed=0)[1].pixels
    torch.manual_seed(2)
    assert torch.equal(first, split(images, 0.2, seed=0)[1].pixels)
    assert not torch.equal(first, split(images, 0.2, seed=1)[1].pixels)


@pytest.mark.parametrize("fraction", [-0.1, 1.1])
def test_fraction_is_checked(fraction: float) -> None:
    with pytest.raises(ValueError, match="expected a number from 0 to 1"):
        split(numbered(torch.zeros(4, dtype=torch.int64)), fraction, seed=0)


class Lazy:
    """Examples that record which rows are read."""

    def __init__(self, images: Images) -> None:
        self.images, self.read = images, []

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: torch.Tensor) -> Images:
        self.read += index.tolist()
        return self.images[index]

    @property
    def labels(self) -> torch.Tensor:
        return self.images.labels

    @property
    def nbytes(self) -> int:
        return self.images.nbytes


def test_a_split_of_lazy_examples_reads_nothing() -> None:
    images = numbered(torch.arange(200) % 10)
    lazy = Lazy(images)
    for ours, expected in zip(split(lazy, 0.2, seed=0), split(images, 0.2, seed=0), strict=True):
        assert lazy.read == []
        assert isinstance(ours, Subset)
        assert len(ours) == len(expected)
        assert ours.nbytes == expected.nbytes
        assert torch.equal(ours.labels, expected.labels)
        for index in (slice(3, 9), torch.tensor([7, 2]), torch.arange(len(ours)) % 3 == 0):
            assert torch.equal(ours[index].pixels, expected[index].pixels)
        assert set(lazy.read) <= set(expected.pixels.flatten().tolist())
        assert torch.equal(ours.to(torch.device("cpu")).pixels, expected.pixels)
        lazy.read.clear()


def test_a_split_of_few_examples_of_each_class() -> None:
    """A tenth of each class rounds to nothing, a tenth of all does not."""
    rest, part = split(numbered(torch.arange(30) % 11), 0.1, seed=0)
    assert (len(rest), len(part)) == (27, 3)
    both = torch.cat([rest.pixels, part.pixels]).flatten()
    assert both.sort().values.tolist() == list(range(30))


@pytest.mark.parametrize("labels", [torch.arange(3), torch.arange(5), torch.zeros(())])
def test_labels_of_another_number_are_refused(labels: torch.Tensor) -> None:
    with pytest.raises(DataError, match=r"labels are .* for 4 examples \(pixels .*one label for"):
        Images(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), labels)
    with pytest.raises(DataError, match=r"labels are .* for 4 examples \(packed .*one label for"):
        Frames(torch.zeros(4, 3, 9, dtype=torch.uint8), labels, (2, 3, 3), 4)


@pytest.mark.parametrize("index", [3, np.int64(3), torch.tensor(3)])
def test_a_position_is_not_an_index(index: int) -> None:
    labels = torch.arange(4)
    images = Images(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), labels)
    for examples in (
        images,
        Subset(images, labels),
        Series(torch.zeros(4, 5, 2), labels),
        Frames(torch.zeros(4, 3, 9, dtype=torch.uint8), labels, (2, 3, 3), 4),
        ImageFolder((Path("a.png"),) * 4, labels, (1, 2, 2)),
    ):
        with pytest.raises(TypeError, match=r"index is .*3\)?: index with a slice, rows or a mask"):
            examples[index]
    for several in ([1, 2], np.array([1, 2]), labels[1:3], slice(1, 3), labels % 3 > 0):
        assert images[several].labels.tolist() == [1, 2]


def test_series_have_targets_of_any_shape() -> None:
    values, targets = torch.randn(20, 7, 2), torch.randn(20, 7, 3)
    series = Series(values, targets)
    batch = series[torch.tensor([3, 1])].to(torch.device("cpu"))
    assert isinstance(batch, Series)
    assert torch.equal(batch.labels, targets[[3, 1]])
    assert torch.equal(expand(batch), values[[3, 1]].transpose(0, 1))
    rest, part = split(series, 0.25, seed=0)
    assert (len(rest), len(part)) == (15, 5)
    both = torch.cat([rest.pixels, part.pixels])
    assert sorted(both[:, 0, 0].tolist()) == sorted(values[:, 0, 0].tolist())
    with pytest.raises(DataError, match=r"labels are \[3, 1\] for 20 examples"):
        Series(values, torch.randn(3, 1))


def test_pixels_are_bytes() -> None:
    with pytest.raises(DataError, match=r"pixels are torch.float32: expected bytes, torch.uint8"):
        Images(torch.rand(4, 1, 2, 2), torch.arange(4))
