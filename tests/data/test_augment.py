"""Augmentations against their definitions, and their use of seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

from spikefuse.data import (
    cutmix,
    cutout,
    drop_events,
    mixup,
    random_erasing,
    random_flip,
    random_shift,
    trivial_augment,
)

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


def one_hot(num: int, classes: int = 4) -> Tensor:
    return F.one_hot(torch.arange(num) % classes, classes).float()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_cutout_is_a_square_with_its_centre_inside(shape: tuple[int, ...]) -> None:
    batch = random_bytes(shape)
    cut = cutout(batch, 3, seeded())
    sizes = set()
    for before, after in zip(batch, cut, strict=True):
        hole = (after == 0).flatten(0, -3).all(0) if after.ndim > 2 else after == 0
        rows, columns = hole.any(1).nonzero().flatten(), hole.any(0).nonzero().flatten()
        assert hole.sum() == len(rows) * len(columns)
        assert torch.equal(after, before * ~hole)
        whole = (rows[0] > 0 and rows[-1] < 5, columns[0] > 0 and columns[-1] < 4)
        assert all(n == 3 or not w for n, w in zip((len(rows), len(columns)), whole, strict=True))
        sizes.add((len(rows), len(columns)))
    assert sizes == {(2, 2), (2, 3), (3, 2), (3, 3)}


def test_erased_rectangles_have_the_area_and_the_aspect() -> None:
    batch = torch.zeros(2000, 1, 40, 30, dtype=torch.uint8)
    erased = random_erasing(batch, seeded(), 0.25)[:, 0] > 0
    chosen = erased.any(2).any(1)
    assert 400 < chosen.sum() < 600
    rows, columns = erased.any(2).sum(1)[chosen], erased.any(1).sum(1)[chosen]
    area = rows * columns / 1200
    # Of 256 random values, one is 0.
    assert (erased.sum((1, 2))[chosen] > 0.9 * rows * columns).all()
    assert 0.015 < area.min() < 0.04 < 0.36 < area.max() < 0.42
    assert 0.19 < area.mean() < 0.23
    inner = (rows < 40) & (columns < 30)
    aspect = (rows / columns)[inner]
    assert 0.25 < aspect.min() < 0.4 < 2.5 < aspect.max() < 4


def test_erasing_fills_with_random_bytes_within_the_image() -> None:
    batch = torch.zeros(300, 3, 8, 8, dtype=torch.uint8)
    values = random_erasing(batch, seeded(), 1.0, area=(1, 1), aspect=(1, 1))
    assert values.flatten().bincount(minlength=256).min() > 100
    square = random_erasing(batch + 1, seeded(), 1.0, area=(0.25, 0.25), aspect=(1, 1))
    changed = (square != 1).any(1)
    assert (changed.any(2).sum(1) == 4).all()
    assert (changed.any(1).sum(1) == 4).all()
    assert len({tuple(row.tolist()) for row in changed.flatten(1)}) == 25


@pytest.mark.parametrize("shape", [(800, 10, 2, 8, 10), (800, 10, 20)])
def test_dropped_events(shape: tuple[int, ...]) -> None:
    batch = torch.full(shape, 6, dtype=torch.uint8)
    left = drop_events(batch, seeded())
    assert left.dtype == torch.uint8
    assert (left <= batch).all()
    kinds = [0, 0, 0, 0]
    kept = []
    for after in left:
        steps = after.flatten(1).float().mean(1)
        sites = after.flatten(1).float().mean(0)
        if (after == 6).all():
            kinds[0] += 1
        elif set(steps.tolist()) == {0.0, 6.0}:
            kinds[1] += 1
            empty = (steps == 0).nonzero().flatten()
            assert 1 <= len(empty) <= 9
            assert len(empty) == empty[-1] - empty[0] + 1
        elif set(sites.tolist()) == {0.0, 6.0}:
            kinds[2] += 1
            share = (sites == 0).float().mean()
            assert 1 / sites.numel() <= share <= (0.3 if after.ndim == 2 else 0.09)
        else:
            kinds[3] += 1
            kept.append(float(steps.mean() / 6))
    assert all(150 < count < 250 for count in kinds)
    tenths = torch.tensor(kept) * 10
    assert torch.equal(tenths.round().unique(), torch.arange(1, 10.0))
    assert (tenths - tenths.round()).abs().max() < 0.5


@pytest.mark.parametrize("alpha", [1e-6, 0.01, 0.02, 0.2, 1.0, 30.0])
def test_weights_of_mixup_have_the_distribution_of_beta(alpha: float) -> None:
    num = 50_000
    targets = torch.arange(2).repeat(num // 2).unsqueeze(1).float()
    _, mixed = mixup(torch.zeros(num, 1), targets, alpha, seeded())
    weight = torch.where(targets == 1, mixed, 1 - mixed).double().numpy()
    for bound in (1e-5, 1e-3, 0.1, 0.3, 0.45, 0.499, 0.501, 0.55, 0.7, 0.9, 0.999):
        expected = scipy.stats.beta.cdf(bound, alpha, alpha)
        error = 4 * (expected * (1 - expected) / num) ** 0.5
        assert (weight <= bound).mean() == pytest.approx(expected, abs=error + 1 / num)


@pytest.mark.parametrize("alpha", [0.3, 1.0, 8.0])
def test_mixup_mixes_pixels_as_it_mixes_labels(alpha: float) -> None:
    # Each image has the value of its position.
    batch = torch.arange(200, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 4, 5)
    targets = one_hot(200, 5)
    mixed, labels = mixup(batch, targets, alpha, seeded())
    assert mixed.dtype == labels.dtype == torch.float32
    torch.testing.assert_close(labels.sum(1), torch.ones(200))
    weight = labels[torch.arange(200), torch.arange(200) % 5]
    own, other = torch.arange(200.0), torch.arange(200.0).roll(1)
    torch.testing.assert_close(mixed[:, 1, 2, 3], weight * own + (1 - weight) * other)
    assert torch.equal(mixed, mixed[:, :1, :1, :1].expand_as(mixed))
    # The variance of Beta(a, a).
    assert weight.mean() == pytest.approx(0.5, abs=0.08)
    assert weight.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.25)


@pytest.mark.parametrize("shape", [(60, 3, 6, 5), (60, 4, 2, 6, 5), (60, 6, 5)])
def test_cutmix_keeps_the_share_of_the_label(shape: tuple[int, ...]) -> None:
    batch, targets = random_bytes(shape), one_hot(60)
    mixed, labels = cutmix(batch, targets, 1.0, seeded())
    assert mixed.dtype == torch.uint8
    weight = labels[torch.arange(60), torch.arange(60) % 4]
    torch.testing.assert_close(labels.sum(1), torch.ones(60))
    torch.testing.assert_close(
        labels, weight[:, None] * targets + (1 - weight[:, None]) * targets.roll(1, 0)
    )
    shares = set()
    for i in range(60):
        own, other, found = batch[i], batch[i - 1], mixed[i]
        pasted = found != own
        pasted = pasted.flatten(0, -3).any(0) if found.ndim > 2 else pasted
        rows, columns = pasted.any(1).nonzero().flatten(), pasted.any(0).nonzero().flatten()
        box = torch.zeros(6, 5, dtype=torch.bool)
        if len(rows):
            box[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] = True
        assert torch.equal(found, torch.where(box, other, own))  # counts of events, too
        if shape != SHAPES[2]:
            assert weight[i] == pytest.approx(1 - float(box.float().mean()), abs=0.04)
        shares.add(round(float(weight[i]) * 30))
    assert len(shares) > 8


def test_a_trivial_augmentation_of_each_image() -> None:
    yy, xx = torch.meshgrid(torch.arange(12), torch.arange(12), indexing="ij")
    image = torch.stack([xx * 12 + 40, yy * 12 + 50, (xx + yy) * 6 + 30]).to(torch.uint8)
    batch = image.expand(300, -1, -1, -1)
    changed = trivial_augment(batch, seeded())
    assert changed.dtype == torch.uint8
    same = (changed == image).flatten(1).all(1).float().mean()
    assert 1 / 14 < same < 0.25  # no operation, or one of the least strength
    assert len({tuple(row.tolist()) for row in changed.flatten(1)}) > 120


AUGMENTATIONS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "random_shift": lambda x, g: random_shift(x, 3, g),
    "random_flip": random_flip,
    "cutout": lambda x, g: cutout(x, 3, g),
    "random_erasing": random_erasing,
    "trivial_augment": trivial_augment,
    "drop_events": lambda x, g: drop_events(x.unsqueeze(2), g),
    "mixup": lambda x, g: mixup(x, one_hot(40), 0.4, g)[0],
    "cutmix": lambda x, g: cutmix(x, one_hot(40), 0.4, g)[0],
}


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_augmentation_depends_on_the_generator_alone(name: str) -> None:
    batch, augment = random_bytes((40, 3, 6, 5)), AUGMENTATIONS[name]
    before = batch.clone()
    torch.manual_seed(1)
    first = augment(batch, seeded(5))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(first, augment(batch, seeded(5)))
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(first, augment(batch, seeded(6)))
    assert torch.equal(batch, before)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_no_shape_depends_on_a_value(name: str) -> None:
    """Tensors without values can be augmented, so no value is read, as a CUDA graph demands."""
    augment = AUGMENTATIONS[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        batch = torch.empty(40, 3, 6, 5, dtype=torch.uint8)
        assert augment(batch, seeded()).shape[0] == 40


@pytest.mark.parametrize("name", [n for n in AUGMENTATIONS if n not in ("mixup", "cutmix")])
def test_an_empty_batch(name: str) -> None:
    assert AUGMENTATIONS[name](random_bytes((0, 3, 6, 5)), seeded()).numel() == 0


def test_no_shift_and_no_flip() -> None:
    batch = random_bytes((4, 3, 6, 5))
    assert random_shift(batch, 0, seeded()) is batch
    assert torch.equal(random_flip(batch, seeded(), 0.0), batch)
    assert torch.equal(random_flip(batch, seeded(), 1.0), batch.flip(-1))


def test_without_a_generator_pytorchs_own_is_used() -> None:
    images, frames = random_bytes((6, 3, 8, 8)), random_bytes((6, 5, 2, 8, 8))
    calls: dict[Callable[..., Tensor | tuple[Tensor, Tensor]], tuple[Any, ...]] = {
        random_shift: (images, 2),
        random_flip: (images,),
        cutout: (images, 3),
        random_erasing: (images,),
        trivial_augment: (images,),
        drop_events: (frames,),
        mixup: (images, one_hot(6), 1.0),
        cutmix: (images, one_hot(6), 1.0),
    }
    for augment, args in calls.items():
        torch.manual_seed(3)
        found = augment(*args)
        torch.testing.assert_close(found, augment(*args, generator=seeded(3)), rtol=0, atol=0)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="distance is -1"):
        random_shift(torch.zeros(2, 3, 4), -1, seeded())
    with pytest.raises(ValueError, match=r"probability is 1\.5"):
        random_flip(torch.zeros(2, 3, 4), seeded(), 1.5)
    with pytest.raises(ValueError, match=r"shape \[2, 3\]: expected \[B, \.\.\., H, W\]"):
        random_flip(torch.zeros(2, 3), seeded())
    with pytest.raises(TypeError, match=r"batch is a ndarray: expected a tensor \[B"):
        random_flip(torch.zeros(2, 3, 4).numpy(), seeded())
    with pytest.raises(ValueError, match="side is -1"):
        cutout(torch.zeros(2, 3, 4), -1, seeded())
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"torch\.float32: expected bytes"):
        random_erasing(images.float(), seeded())
    with pytest.raises(ValueError, match=r"area is \(0, 1\): expected 0 < least"):
        random_erasing(images, seeded(), area=(0, 1))
    with pytest.raises(ValueError, match=r"aspect is \(2, 1\): expected 0 < least"):
        random_erasing(images, seeded(), aspect=(2, 1))
    with pytest.raises(ValueError, match=r"\[2, 3, 4, 4\]: expected \[B, T, P, H, W\]"):
        drop_events(images, seeded())
    with pytest.raises(ValueError, match=r"\[2, 2, 4, 4\]: .*1 or 3 channels"):
        trivial_augment(images[:, :2], seeded())
    for mix in (mixup, cutmix):
        for alpha in (0, float("inf")):
            with pytest.raises(ValueError, match=f"alpha is {alpha}: expected a positive number"):
                mix(images, one_hot(2), alpha, seeded())
        with pytest.raises(ValueError, match=r"int64 \[2\]: expected class probabilities \[2, N\]"):
            mix(images, torch.tensor([0, 1]), 1.0, seeded())
