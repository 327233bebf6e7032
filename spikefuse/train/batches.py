"""Batches of images that lie in memory.

Shape legend: B images of a batch, C channels, H rows, W columns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from spikefuse.data import Images
from spikefuse.train.randomness import order

Batch = tuple[Tensor, Tensor]


class TrainBatches:
    """One epoch of shuffled batches per iteration, from wherever the run stands.

    The position is not counted here: epoch and batch follow from the number of optimizer steps
    done, so that a resumed run needs no state of this object. The images of an incomplete last
    batch are left out; the next epoch shuffles anew.

    Args:
        images: the training images.
        batch_size: images per batch, at most `len(images)`.
        seed: the run's seed.
        steps_done: number of optimizer steps done so far.
    """

    def __init__(
        self, images: Images, batch_size: int, seed: int, steps_done: Callable[[], int]
    ) -> None:
        self.images, self.batch_size = images, batch_size
        self.seed, self.steps_done = seed, steps_done

    def __len__(self) -> int:
        return len(self.images) // self.batch_size

    def __iter__(self) -> Iterator[Batch]:
        epoch, first = divmod(self.steps_done(), len(self))
        shuffled = order(len(self.images), self.seed, epoch).to(self.images.labels.device)
        for chosen in shuffled.split(self.batch_size)[first : len(self)]:
            batch = self.images[chosen]
            yield batch.pixels, batch.labels


class EvalBatches:
    """All images in order, in batches of at most `batch_size`."""

    def __init__(self, images: Images, batch_size: int) -> None:
        self.images, self.batch_size = images, batch_size

    def __len__(self) -> int:
        return -(-len(self.images) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        pixels = self.images.pixels.split(self.batch_size)
        return zip(pixels, self.images.labels.split(self.batch_size), strict=True)


class Timed:
    """The same batches, whose consumer's time of waiting is reported.

    Args:
        batches: what to iterate over, with a length.
        wait: called with the seconds that each batch took to come.
    """

    def __init__(self, batches: Iterable[Batch], wait: Callable[[float], None]) -> None:
        self.batches, self.wait = batches, wait

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        iterator, end = iter(self.batches), object()
        while True:
            start = time.perf_counter()
            batch = next(iterator, end)
            self.wait(time.perf_counter() - start)
            if batch is end:
                return
            yield batch  # type: ignore[misc]


def shifted(pixels: Tensor, distance: int) -> Tensor:
    """Move each image by up to `distance` pixels in each direction, filling with zeros.

    Args:
        pixels: `[B, C, H, W]`, or frames `[B, T, C, H, W]`, those of one sample moved alike.
        distance: the largest move; 0 returns `pixels` itself.
    """
    if distance == 0:
        return pixels
    if pixels.ndim == 5:
        return shifted(pixels.flatten(1, 2), distance).unflatten(1, pixels.shape[1:3])
    num, channels, height, width = pixels.shape
    padded = F.pad(pixels, (distance,) * 4)

    def places(size: int) -> Tensor:
        offsets = torch.randint(0, 2 * distance + 1, (num, 1), device=pixels.device)
        return offsets + torch.arange(size, device=pixels.device)

    image = torch.arange(num, device=pixels.device).view(num, 1, 1, 1)
    channel = torch.arange(channels, device=pixels.device).view(1, channels, 1, 1)
    rows, columns = places(height), places(width)
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]
