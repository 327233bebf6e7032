"""The operations of TrivialAugment against those of Pillow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from spikefuse.data.trivial_augment import OPERATIONS, apply

STRENGTHS = (0.0, 0.1, 17 / 30, 1.0)
BLENDS = ("brightness", "color", "contrast", "sharpness")


def picture(channels: int) -> np.ndarray:
    y, x = np.mgrid[:32, :40]
    planes = np.stack([x * 5 + 20, y * 6, (x + y) * 3], -1)
    noise = np.random.default_rng(0).integers(0, 40, planes.shape)
    image = np.clip(planes + noise, 10, 240).astype(np.uint8)
    return image[..., 0] if channels == 1 else image


def by_pillow(image: Image.Image, name: str, strength: float, sign: int) -> Image.Image:
    signed = strength * sign
    matrices = {
        "shear_x": (1, signed * 0.99, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, signed * 0.99, 1, 0),
        "translate_x": (1, 0, int(signed * 32), 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, int(signed * 32)),
    }
    if name in matrices:
        return image.transform(image.size, Image.Transform.AFFINE, matrices[name])
    if name == "rotate":
        return image.rotate(signed * 135)
    if name in BLENDS:
        return getattr(ImageEnhance, name.title())(image).enhance(1 + signed * 0.99)
    if name == "posterize":
        return ImageOps.posterize(image, 8 - round(strength * 6))
    if name == "solarize":
        return ImageOps.solarize(image, 255 - 255 * strength)
    return image if name == "identity" else getattr(ImageOps, name)(image)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_those_of_pillow(name: str, channels: int) -> None:
    image = Image.fromarray(picture(channels))
    batch = torch.from_numpy(picture(channels).reshape(1, 32, 40, channels)).permute(0, 3, 1, 2)
    for strength in STRENGTHS:
        for sign in (-1, 1):
            draws = torch.tensor([OPERATIONS.index(name)]), torch.tensor([strength])
            found = apply(batch, *draws, torch.tensor([sign]))[0].permute(1, 2, 0).numpy()
            expected = np.asarray(by_pillow(image, name, strength, sign)).reshape(found.shape)
            difference = np.abs(found.astype(int) - expected)
            if name == "rotate":  # in which a pixel may be at the same distance from two
                assert (difference > 0).mean() < 0.03
            else:
                assert difference.max() <= (name in BLENDS)


@pytest.mark.parametrize("size", [(1, 5), (2, 2), (3, 3), (4, 3)])
def test_sharpness_of_small_images_is_that_of_pillow(size: tuple[int, int]) -> None:
    image = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    draws = torch.tensor([OPERATIONS.index("sharpness")]), torch.tensor([1.0])
    for sign in (-1, 1):
        found = apply(torch.from_numpy(image)[None, None], *draws, torch.tensor([sign]))
        expected = np.asarray(by_pillow(Image.fromarray(image), "sharpness", 1.0, sign))
        assert np.abs(found[0, 0].numpy().astype(int) - expected).max() <= 1


def test_images_of_one_value_stay() -> None:
    batch = torch.full((2, 3, 5, 5), 77, dtype=torch.uint8)
    operation = torch.tensor([OPERATIONS.index("autocontrast"), OPERATIONS.index("equalize")])
    assert torch.equal(apply(batch, operation, torch.ones(2), torch.ones(2)), batch)
