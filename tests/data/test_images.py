"""Splits are stratified, disjoint and a function of the seed."""

from __future__ import annotations

import pytest
import torch

from spikefuse.data import Images, split


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
