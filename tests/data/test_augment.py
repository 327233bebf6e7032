"""Augmentations against their definitions, and their use of seeds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spikefuse.data import random_flip, random_shift

SHAPES = [(40, 3, 6, 5), (40, 4, 2, 6, 5), (40, 6, 5)]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_bytes(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(1, 256, shape, dtype=torch.uint8, generator=seeded(9))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shift_is_a_crop_of_the_padded_example(shape: tuple[int, ...]) -> None:
    batch = random_bytes(shape)
    moved = random_shift(batch, 2, seeded())
    assert moved.dtype == torch.uint8
    assert moved.shape == batch.shape
    places = set()
    for before, after in zip(batch, moved, strict=True):
        padded = F.pad(before, (2, 2, 2, 2))
        fits = [
            (row, column)
            for row in range(5)
            for column in range(5)
            if torch.equal(padded[..., row : row + 6, column : column + 5], after)
        ]
        assert len(fits) == 1  # one place for all its time steps and channels
        places.update(fits)
    assert len(places) > 12
    assert {row for row, _ in places} == {column for _, column in places} == set(range(5))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_flip_mirrors_whole_examples(shape: tuple[int, ...]) -> None:
    batch = random_bytes(shape)
    flipped = random_flip(batch, seeded())
    mirrored = [torch.equal(a, b.flip(-1)) for a, b in zip(flipped, batch, strict=True)]
    kept = [torch.equal(a, b) for a, b in zip(flipped, batch, strict=True)]
    assert all(a != b for a, b in zip(mirrored, kept, strict=True))
    assert 10 < sum(mirrored) < 30


@pytest.mark.parametrize("augment", [lambda x, g: random_shift(x, 3, g), random_flip])
def test_augmentation_depends_on_the_seed(
    augment: Callable[[Tensor, torch.Generator], Tensor],
) -> None:
    batch = random_bytes((40, 3, 6, 5))
    torch.manual_seed(1)
    first = augment(batch, seeded(5))
    torch.manual_seed(2)
    assert torch.equal(first, augment(batch, seeded(5)))
    assert not torch.equal(first, augment(batch, seeded(6)))


def test_no_shift_and_no_flip() -> None:
    batch = random_bytes((4, 3, 6, 5))
    assert random_shift(batch, 0, seeded()) is batch
    assert torch.equal(random_flip(batch, seeded(), 0.0), batch)
    assert torch.equal(random_flip(batch, seeded(), 1.0), batch.flip(-1))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="distance is -1"):
        random_shift(torch.zeros(2, 3, 4), -1, seeded())
    with pytest.raises(ValueError, match=r"probability is 1\.5"):
        random_flip(torch.zeros(2, 3, 4), seeded(), 1.5)
    with pytest.raises(ValueError, match=r"shape \[2, 3\]: expected \[B, \.\.\., H, W\]"):
        random_flip(torch.zeros(2, 3), seeded())
