"""TrivialAugment: one random operation of random strength for each image of a batch.

An image passes through a change of place, a blend with a second image, and a table of values. Each
operation is one of the three and leaves the other two as they are, so the cost for a batch does not
depend on the operations drawn, and a CUDA graph can hold them.

Shape legend: B images, C channels, H rows, W columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

OPERATIONS = (
    *("identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate"),
    *("brightness", "color", "contrast", "sharpness"),
    *("posterize", "solarize", "autocontrast", "equalize"),
)
# The strongest form of each operation in the paper's space "Wide".
SHEAR, PIXELS, ANGLE, BLEND, BITS = 0.99, 32.0, math.radians(135), 0.99, 6
LEVELS = 31
# Of red, green and blue, in grey.
GREY = (0.299, 0.587, 0.114)


def trivial_augment(batch: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Apply one operation to each image, drawn uniformly, with a strength drawn uniformly.

    The operations are those of the space "Wide": none, shear, translation and rotation, where
    pixels from outside are black; brightness, colour, contrast and sharpness; posterization,
    solarization, stretched contrast and equalized histograms. They compute what Pillow does, up to
    rounding of values. A rotation takes the nearest pixel: at angles such as 135 degrees, up to 3 %
    of the places are as far from two pixels, of which Pillow may take the other one. Unlike
    RandAugment, there is nothing to tune.

    Example::

        batch = torch.randint(256, (32, 3, 32, 32), dtype=torch.uint8)
        batch = sf.data.trivial_augment(batch)

    Source: Müller and Hutter, "TrivialAugment: Tuning-free Yet State-of-the-Art Data Augmentation",
    ICCV 2021.

    Args:
        batch: images, uint8 `[B, C, H, W]`, where C is 1 or 3.
        generator: random number generator on the device of `batch`; None for PyTorch's own.

    Raises:
        ValueError: `batch` has another shape or dtype.
    """
    if batch.dtype != torch.uint8 or batch.ndim != 4 or batch.shape[1] not in (1, 3):
        raise ValueError(
            f"batch is {batch.dtype} {list(batch.shape)}: expected torch.uint8 [B, C, H, W] with 1 "
            "or 3 channels"
        )
    num, device = len(batch), batch.device
    operation = torch.randint(len(OPERATIONS), (num,), device=device, generator=generator)
    level = torch.randint(LEVELS, (num,), device=device, generator=generator)
    sign = torch.randint(2, (num,), device=device, generator=generator) * 2 - 1
    return apply(batch, operation, level / (LEVELS - 1), sign)


def apply(batch: Tensor, operation: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """Apply an operation to each image.

    Args:
        batch: as in `trivial_augment`.
        operation: positions in `OPERATIONS`, `[B]`.
        strength: float32 `[B]`, in [0, 1].
        sign: `[B]`, -1 or 1: of changes of place, and 1 where a blend is stronger than the image.
    """

    def amount(name: str, values: Tensor) -> Tensor:
        return torch.where(operation == OPERATIONS.index(name), values, 0)

    def chosen(name: str) -> Tensor:
        return (operation == OPERATIONS.index(name)).view(-1, 1, 1, 1)

    signed = strength * sign
    angle = amount("rotate", signed * ANGLE)
    shear = [amount(name, signed * SHEAR) for name in ("shear_x", "shear_y")]
    # Whole pixels, as the rest of the operation.
    shift = [amount(f"translate_{axis}", (signed * PIXELS).trunc()) for axis in "xy"]
    pixels = _move(batch, angle, shear, shift).float()

    grey = pixels
    if batch.shape[1] == 3:
        red, green, blue = pixels.split(1, 1)
        grey = (GREY[0] * red + GREY[1] * green + GREY[2] * blue).round()
    smooth = ((F.avg_pool2d(pixels, 3, 1, 1) * 9 + pixels * 4) / 13).round()
    inner = torch.zeros(batch.shape[2:], dtype=torch.bool, device=batch.device)
    inner[1:-1, 1:-1] = True
    smooth = torch.where(inner, smooth, pixels)  # the border stays, as in Pillow
    second = torch.where(chosen("color"), grey, 0)
    second = torch.where(chosen("contrast"), grey.mean((1, 2, 3), keepdim=True).round(), second)
    second = torch.where(chosen("sharpness"), smooth, second)
    blends = ("brightness", "color", "contrast", "sharpness")
    factor = 1 + torch.stack([amount(name, signed * BLEND) for name in blends]).sum(0)
    factor = factor.view(-1, 1, 1, 1)
    blended = torch.lerp(second, pixels, factor).clamp(0, 255).to(torch.uint8)

    index = blended.flatten(2).long()
    return _tables(index, chosen, strength).gather(2, index).view(batch.shape)


def _move(batch: Tensor, angle: Tensor, shear: list[Tensor], shift: list[Tensor]) -> Tensor:
    """Take each pixel from another place, which depends on the image; from outside it is 0.

    Rotation is about the centre, and shear about the upper left corner. The nearest pixel is taken.
    """
    height, width = batch.shape[2:]
    device = batch.device
    x = (torch.arange(width, device=device) + 0.5).view(1, 1, -1)
    y = (torch.arange(height, device=device) + 0.5).view(1, -1, 1)
    cos, sin = (f(angle).view(-1, 1, 1) for f in (torch.cos, torch.sin))
    right, down = x - width / 2, y - height / 2
    column = cos * right - sin * down + width / 2 + shear[0].view(-1, 1, 1) * y
    row = sin * right + cos * down + height / 2 + shear[1].view(-1, 1, 1) * x
    column, row = (
        (place + distance.view(-1, 1, 1)).floor().long()
        for place, distance in ((column, shift[0]), (row, shift[1]))
    )
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    source = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
    flat = batch.flatten(2)
    moved = flat.gather(2, source.flatten(1).unsqueeze(1).expand(flat.shape))
    return moved.view(batch.shape) * inside.unsqueeze(1)


def _tables(index: Tensor, chosen: Callable[[str], Tensor], strength: Tensor) -> Tensor:
    """Return the new value of each value in each channel, uint8 `[B, C, 256]`.

    Args:
        index: pixels, int64 `[B, C, H W]`.
        chosen: returns bool `[B, 1, 1, 1]`, whether an image has an operation.
        strength: `[B]`.
    """
    value = torch.arange(256, device=index.device)
    level = strength.view(-1, 1, 1)
    table = value.expand(*index.shape[:2], 256)

    def change(name: str, values: Tensor) -> None:
        nonlocal table
        table = torch.where(chosen(name).squeeze(3), values, table)

    lost = 2 ** (level * BITS).round().long()
    change("posterize", value - value % lost)
    change("solarize", torch.where(value < 255 - 255 * level, value, 255 - value))
    low, high = index.amin(2, keepdim=True), index.amax(2, keepdim=True)
    stretched = (value - low) * 255 // (high - low).clamp(min=1)
    change("autocontrast", torch.where(high > low, stretched, value))
    # Whole numbers below 2**24, so that the order of additions makes no difference.
    counts = torch.zeros(table.shape, device=index.device)
    counts = counts.scatter_add_(2, index, torch.ones_like(index, dtype=counts.dtype)).long()
    # The number of pixels per value of the result; Pillow leaves out the highest value.
    step = (index.shape[2] - counts.gather(2, high)) // 255
    below = counts.cumsum(2) - counts
    equalized = (below + step // 2) // step.clamp(min=1)
    change("equalize", torch.where(step > 0, equalized, value))
    return table.clamp(0, 255).to(torch.uint8)
