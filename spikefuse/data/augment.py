"""Augmentations of whole batches, on the device of the batch.

Examples are transformed independently, but all time steps and channels of an example alike. Batches
are `[B, ..., H, W]` of any dtype; for `[T, B, ...]` pass `x.transpose(0, 1)`. No shape depends on a
value, and random numbers come from the given generator or else from PyTorch's default one of the
device, so that a CUDA graph can hold all of them.

Shape legend: B examples, T time steps, P polarities, H rows, W columns, N classes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def random_shift(batch: Tensor, distance: int, generator: torch.Generator | None = None) -> Tensor:
    """Shift each example by up to `distance` pixels in both dimensions, filling with zeros.

    Equivalent to padding by `distance` and cropping at random, as usual for CIFAR-10 with 4.

    Example::

        batch = sf.data.random_shift(torch.rand(32, 3, 32, 32), distance=4)

    Source: Lee, Xie, Gallagher, Zhang, Tu, "Deeply-Supervised Nets", AISTATS 2015.

    Args:
        batch: `[B, ..., H, W]`.
        distance: largest shift; 0 returns `batch` itself.
        generator: random number generator on the device of `batch`; None for PyTorch's own.

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
    planes = F.pad(_planes(batch, height), (distance,) * 4)
    offsets = torch.randint(0, 2 * distance + 1, (2, num, 1), device=device, generator=generator)
    rows = offsets[0] + torch.arange(height, device=device)
    columns = offsets[1] + torch.arange(width, device=device)
    example = torch.arange(num, device=device).view(num, 1, 1, 1)
    plane = torch.arange(planes.shape[1], device=device).view(1, -1, 1, 1)
    moved = planes[example, plane, rows[:, None, :, None], columns[:, None, None, :]]
    return moved.view(batch.shape)


def random_flip(
    batch: Tensor, generator: torch.Generator | None = None, probability: float = 0.5
) -> Tensor:
    """Mirror each example left to right with the given probability.

    Unsuitable for gestures and digits, whose meaning changes.

    Example::

        batch = sf.data.random_flip(torch.rand(32, 3, 32, 32))

    Args:
        batch: `[B, ..., H, W]`.
        generator: random number generator on the device of `batch`; None for PyTorch's own.
        probability: probability of a flip, in [0, 1].

    Raises:
        ValueError: `probability` is out of range, or `batch` has fewer than three dimensions.
    """
    _check(batch, probability)
    chosen = _per_example(_uniform(batch, generator) < probability, batch)
    return torch.where(chosen, batch.flip(-1), batch)


def cutout(batch: Tensor, side: int, generator: torch.Generator | None = None) -> Tensor:
    """Set a square at a random place in each example to zero.

    Its centre is uniform over the pixels, so part of the square may lie outside. A side of 16 is
    usual for CIFAR-10, and 8 for CIFAR-100.

    Example::

        batch = sf.data.cutout(torch.rand(32, 3, 32, 32), side=16)

    Source: DeVries and Taylor, "Improved Regularization of Convolutional Neural Networks with
    Cutout", 2017.

    Args:
        batch: `[B, ..., H, W]`.
        side: rows and columns of the square; 0 returns `batch` itself.
        generator: random number generator on the device of `batch`; None for PyTorch's own.

    Raises:
        ValueError: `side` is negative, or `batch` has fewer than three dimensions.
    """
    _check(batch)
    if side < 0:
        raise ValueError(f"side is {side}: expected at least 0")
    if side == 0:
        return batch
    sides = torch.full((len(batch),), side, device=batch.device)
    return batch.masked_fill(_boxes(batch, sides, sides, generator), 0)


def random_erasing(
    batch: Tensor,
    generator: torch.Generator | None = None,
    probability: float = 0.5,
    area: tuple[float, float] = (0.02, 0.4),
    aspect: tuple[float, float] = (0.3, 10 / 3),
) -> Tensor:
    """Replace a rectangle within each image by random bytes, with the given probability.

    With a share $s$ of the image's area uniform in `area` and a ratio $r$ of rows to columns, whose
    logarithm is uniform in that of `aspect`, the rectangle has $\\sqrt{s H W r}$ rows and
    $\\sqrt{s H W / r}$ columns, rounded, and at most those of the image. It lies inside the image.

    Example::

        batch = torch.randint(256, (32, 3, 32, 32), dtype=torch.uint8)
        batch = sf.data.random_erasing(batch, probability=0.25)

    Source: Zhong, Zheng, Kang, Li, Yang, "Random Erasing Data Augmentation", AAAI 2020 (RE-R).

    Args:
        batch: images, uint8 `[B, ..., H, W]`.
        generator: random number generator on the device of `batch`; None for PyTorch's own.
        probability: probability that an image is changed, in [0, 1].
        area: least and greatest share.
        aspect: least and greatest ratio.

    Raises:
        ValueError: an argument is out of range, or `batch` has fewer than three dimensions or
            another dtype.
    """
    _check(batch, probability)
    if batch.dtype != torch.uint8:
        raise ValueError(f"batch is {batch.dtype}: expected bytes, torch.uint8")
    if not 0 < area[0] <= area[1] <= 1:
        raise ValueError(f"area is {area}: expected 0 < least <= greatest <= 1")
    if not 0 < aspect[0] <= aspect[1]:
        raise ValueError(f"aspect is {aspect}: expected 0 < least <= greatest")
    chosen = _per_example(_uniform(batch, generator) < probability, batch)
    share = area[0] + (area[1] - area[0]) * _uniform(batch, generator)
    low, high = math.log(aspect[0]), math.log(aspect[1])
    ratio = (low + (high - low) * _uniform(batch, generator)).exp()
    pixels = share * (batch.shape[-2] * batch.shape[-1])
    sizes = (pixels * ratio).sqrt().round(), (pixels / ratio).sqrt().round()
    inside = _boxes(batch, *sizes, generator, within=True)
    values = torch.randint(
        256, batch.shape, dtype=torch.uint8, device=batch.device, generator=generator
    )
    return torch.where(chosen & inside, values, batch)


def drop_events(batch: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Drop events of each recording at random.

    One of four things happens to a recording, with equal probability: nothing; a share of
    consecutive steps is emptied; an area of the sensor is emptied at all steps; or each event is
    dropped with the same probability. The share and the probability are uniform in {0.1, ..., 0.9},
    the area's share of the rows and of the columns in {0.05, 0.1, ..., 0.3}.

    Example::

        frames = torch.randint(4, (32, 10, 2, 34, 34), dtype=torch.uint8)
        frames = sf.data.drop_events(frames)

    Source: Gu, Sng, Hu, Li, "EventDrop: Data Augmentation for Event-based Learning", IJCAI 2021.

    Args:
        batch: counts of events `[B, T, P, H, W]`, or `[B, T, W]` for audio.
        generator: random number generator on the device of `batch`; None for PyTorch's own.

    Raises:
        ValueError: `batch` has another number of dimensions.
    """
    if batch.ndim not in (3, 5):
        raise ValueError(
            f"batch has shape {list(batch.shape)}: expected [B, T, P, H, W] or [B, T, W]"
        )
    num, num_steps, width = batch.shape[0], batch.shape[1], batch.shape[-1]
    height = batch.shape[-2] if batch.ndim == 5 else 1
    kind = torch.randint(4, (num,), device=batch.device, generator=generator)
    ninth = torch.randint(1, 10, (num,), device=batch.device, generator=generator)
    sixth = torch.randint(1, 7, (num,), device=batch.device, generator=generator)

    steps = (ninth / 10 * num_steps).round()
    first = (_uniform(batch, generator) * (num_steps - steps + 1)).floor()
    empty = (kind == 1).unsqueeze(1) & _between(num_steps, first, steps)
    # Without rows, the area is a range of columns.
    flat = _planes(batch, height)
    sizes = ((sixth / 20 * extent).round() for extent in (height, width))
    rows, columns = (size.clamp(min=1) for size in sizes)
    area = _boxes(flat, rows, columns, generator, within=True)
    area &= _per_example(kind == 2, flat)
    kept = flat.masked_fill(area, 0).view(batch.shape)
    kept = kept.masked_fill(empty.view(num, num_steps, *[1] * (batch.ndim - 2)), 0)
    probability = torch.where(kind == 3, 1 - ninth / 10, 1.0)
    share = _per_example(probability, batch).expand(batch.shape)
    return torch.binomial(kept.float(), share, generator).to(batch.dtype)


def mixup(
    batch: Tensor, targets: Tensor, alpha: float, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Return `λ x + (1 - λ) x'` of each example x and the one before it, x', and so the targets.

    λ is drawn from Beta(α, α) for each example. A batch is in random order, so that the example
    before is a random one.

    Example::

        batch, labels = torch.rand(32, 3, 32, 32), torch.randint(10, (32,))
        targets = nn.functional.one_hot(labels, 10).float()
        batch, targets = sf.data.mixup(batch, targets, alpha=0.2)

    Source: Zhang, Cisse, Dauphin, Lopez-Paz, "mixup: Beyond Empirical Risk Minimization", ICLR
    2018.

    Args:
        batch: `[B, ...]`.
        targets: class probabilities, floating point `[B, N]`, such as one-hot classes.
        alpha: positive; 1 makes λ uniform.
        generator: random number generator on the device of `batch`; None for PyTorch's own.

    Returns:
        The mixed batch, in float32 if it has whole numbers, and the mixed targets.

    Raises:
        ValueError: `alpha` is not positive, or the targets have another shape or dtype.
    """
    weight = _beta(batch, targets, alpha, generator)
    values = batch if batch.is_floating_point() else batch.float()
    share = _per_example(weight, values).to(values.dtype)
    return torch.lerp(values.roll(1, 0), values, share), _mixed(targets, weight)


def cutmix(
    batch: Tensor, targets: Tensor, alpha: float, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Paste a rectangle of the example before into each example, and mix the targets by area.

    With λ from Beta(α, α), the rectangle has $H \\sqrt{1 - λ}$ rows and $W \\sqrt{1 - λ}$ columns,
    rounded. Its centre is uniform over the pixels. The weight of an example's own target is the
    share of the pixels that it keeps. All time steps and channels have the same rectangle, so that
    the events of a recording are those of one example inside it and of another outside.

    Example::

        batch, labels = torch.rand(32, 3, 32, 32), torch.randint(10, (32,))
        targets = nn.functional.one_hot(labels, 10).float()
        batch, targets = sf.data.cutmix(batch, targets, alpha=1.0)

    Source: Yun, Han, Oh, Chun, Choe, Yoo, "CutMix: Regularization Strategy to Train Strong
    Classifiers with Localizable Features", ICCV 2019.

    Args:
        batch: `[B, ..., H, W]`.
        targets, alpha, generator: as in `mixup`.

    Returns:
        The mixed batch, of the same dtype, and the mixed targets.

    Raises:
        ValueError: `alpha` is not positive, the targets have another shape or dtype, or `batch` has
            fewer than three dimensions.
    """
    _check(batch)
    side = (1 - _beta(batch, targets, alpha, generator)).sqrt()
    rows, columns = ((side * extent).round() for extent in batch.shape[-2:])
    inside = _boxes(batch, rows, columns, generator)
    kept = 1 - inside.flatten(1).float().mean(1)
    return torch.where(inside, batch.roll(1, 0), batch), _mixed(targets, kept)


def _beta(
    batch: Tensor, targets: Tensor, alpha: float, generator: torch.Generator | None
) -> Tensor:
    """Check the arguments of a mixture, and draw from Beta(α, α) for each example."""
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha is {alpha}: expected a positive number")
    if targets.shape[:1] != batch.shape[:1] or targets.ndim != 2 or not targets.is_floating_point():
        raise ValueError(
            f"targets are {targets.dtype} {list(targets.shape)}: expected class probabilities "
            f"[{len(batch)}, N], such as one_hot(labels, N).float()"
        )
    a, b = _log_gamma(alpha, (2, len(batch)), batch.device, generator)
    return torch.sigmoid(a - b)  # exp(a) / (exp(a) + exp(b))


def _log_gamma(
    alpha: float, shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """Draw logarithms of Gamma(α, 1), most of whose values are too small for float32 if α is small.

    As Marsaglia and Tsang, "A simple method for generating gamma variables": of 16 candidates, each
    is rejected with a probability below 0.05.
    """
    d, options = alpha + 2 / 3, dict[str, Any](device=device, generator=generator)
    x, u = torch.randn(16, *shape, **options), torch.rand(16, *shape, **options)
    v = (1 + x / math.sqrt(9 * d)) ** 3
    is_accepted = (v > 0) & (u.log() < x.square() / 2 + d * (1 - v + v.clamp_min(1e-30).log()))
    accepted = v.gather(0, is_accepted.byte().argmax(0, keepdim=True))[0]
    # Of Gamma(α + 1), which is also defined for α < 1.
    log_power = torch.rand(shape, **options).clamp_min(2**-25).log() / alpha
    return accepted.clamp_min(1e-30).log() + log_power


def _mixed(targets: Tensor, weight: Tensor) -> Tensor:
    return torch.lerp(targets.roll(1, 0), targets, weight.unsqueeze(1).to(targets.dtype))


def _boxes(
    batch: Tensor,
    rows: Tensor,
    columns: Tensor,
    generator: torch.Generator | None,
    within: bool = False,
) -> Tensor:
    """Return a mask `[B, 1, ..., H, W]` of a rectangle at a random place in each example.

    Args:
        rows, columns: its size in each example, `[B]`, whole numbers.
        within: place the whole rectangle inside, and limit its size to that of the example; else,
            place its centre inside.
    """
    masks = []
    for extent, size in zip(batch.shape[-2:], (rows, columns), strict=True):
        draws = _uniform(batch, generator)
        if within:
            size = size.clamp(max=extent)
            start = (draws * (extent - size + 1)).floor()
        else:
            start = (draws * extent).floor() - (size / 2).floor()
        masks.append(_between(extent, start, size))
    inside = masks[0].unsqueeze(2) & masks[1].unsqueeze(1)
    return inside.view(len(batch), *[1] * (batch.ndim - 3), *inside.shape[1:])


def _between(extent: int, start: Tensor, size: Tensor) -> Tensor:
    """Return bool `[B, extent]`: whether a position is one of the `size` ones from `start`."""
    position = torch.arange(extent, device=start.device) - start.unsqueeze(1)
    return (position >= 0) & (position < size.unsqueeze(1))


def _uniform(batch: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.rand(len(batch), device=batch.device, generator=generator)


def _per_example(values: Tensor, batch: Tensor) -> Tensor:
    return values.view(-1, *[1] * (batch.ndim - 1))


def _planes(batch: Tensor, height: int) -> Tensor:
    """View a batch, which may be empty, as `[B, C, H, W]`."""
    num, width = batch.shape[0], batch.shape[-1]
    return batch.reshape(num, batch.shape[1:-1].numel() // height, height, width)


def _check(batch: Tensor, probability: float = 0.0) -> None:
    if not isinstance(batch, Tensor):
        raise TypeError(f"batch is a {type(batch).__name__}: expected a tensor [B, ..., H, W]")
    if batch.ndim < 3:
        raise ValueError(f"batch has shape {list(batch.shape)}: expected [B, ..., H, W]")
    if not 0 <= probability <= 1:
        raise ValueError(f"probability is {probability}: expected a number from 0 to 1")
