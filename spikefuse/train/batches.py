"""Batches of examples; the seed determines the order of the training batches.

A batch is (inputs, labels) on the device of the run: images `[B, C, H, W]` or event frames
`[B, T, ...]`, as bytes, or series `[B, T, ...]`, as floats. A dataset that is small relative to the
GPU's memory is placed there as a whole. Batches of other datasets are prefetched by a thread.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spikefuse import data
from spikefuse.data import Examples, Frames
from spikefuse.data.registry import describe
from spikefuse.nn import Events
from spikefuse.nn.encode import direct, poisson
from spikefuse.train.config import TrainConfig
from spikefuse.train.fields import ConfigError
from spikefuse.train.seeding import order

Batch = tuple[Tensor, Tensor]
CPU = torch.device("cpu")
WHOLE = slice(None)
# Largest fraction of a GPU's free memory that a dataset may take.
MEMORY_FRACTION = 0.25
PREFETCHED_BATCHES = 3


def place(examples: Examples, device: torch.device) -> Examples:
    """Move a dataset to a GPU if there is enough memory; otherwise return it unchanged."""
    if device.type != "cuda":
        return examples
    limit = MEMORY_FRACTION * torch.cuda.mem_get_info(device)[0]
    return examples if examples.nbytes > limit else examples.to(device)


def load_examples(
    config: TrainConfig, directory: Path | str | None, download: bool
) -> tuple[TrainConfig, tuple[Examples, ...]]:
    """Load the examples of a run, and return its settings with the classes of the files.

    Raises:
        DataError: a file is missing or damaged, or the download failed.
        ConfigError: the run has other classes, or the dataset has no files.
    """
    for name, value in (("data_dir", directory), ("download", download)):
        if value and config.dataset == "digits":
            raise ConfigError(
                f"{name} is given, but digits has no files: remove it, or name another dataset; "
                "files of your own need --dataset folder (images) or --dataset events (recordings)"
            )
    dataset = describe(config.dataset, directory, **config.transform())
    if config.data.describe is not None:
        config = config.with_files_of(dataset)
    return config, data.load(dataset, directory, download)


def checksums(parts: tuple[Examples, ...]) -> list[int]:
    """Return a checksum of the labels of each part, which tells whether its examples are the same.

    Where a part is drawn from all examples, one more or less changes which ones are in it.
    """
    return [zlib.crc32(part.labels.cpu().numpy().tobytes()) for part in parts]


def contents(batch: Examples, packed: bool) -> Tensor:
    """Return the inputs of a batch, or with `packed` the packed bits of event frames."""
    return batch.packed if packed and isinstance(batch, Frames) else batch.pixels


def augment(
    inputs: Tensor, labels: Tensor, config: TrainConfig, num_classes: int
) -> tuple[Tensor, Tensor]:
    """Change a batch at random, as `TrainingModule.augment` does."""
    if config.drop_events:
        inputs = data.drop_events(inputs)
    if config.shift:
        inputs = data.random_shift(inputs, config.shift)
    if config.flip:
        inputs = data.random_flip(inputs)
    if config.trivial_augment:
        inputs = data.trivial_augment(inputs)
    if config.cutout:
        inputs = data.cutout(inputs, config.cutout)
    if config.erase:
        inputs = data.random_erasing(inputs, probability=config.erase)
    if not config.mixup and not config.cutmix:
        return inputs, labels
    one_hot = labels.unsqueeze(1) == torch.arange(num_classes, device=labels.device)
    batch = inputs, one_hot.float()
    if not config.mixup:
        return data.cutmix(*batch, config.cutmix)
    mixed = data.mixup(*batch, config.mixup)
    if not config.cutmix:
        return mixed
    pasted = data.cutmix(*batch, config.cutmix)
    first = torch.rand(len(inputs), device=inputs.device) < 0.5
    values, targets = (
        torch.where(first.view(-1, *[1] * (a.ndim - 1)), a, b)
        for a, b in zip(mixed, pasted, strict=True)
    )
    return values, targets


def encode(inputs: Tensor, config: TrainConfig, share: slice = WHOLE) -> Tensor | Events:
    """Convert a batch to the network's input, as `TrainingModule.encode` does."""
    dataset = config.data
    if dataset.kind != "images":
        frames = inputs[share].transpose(0, 1)
        if config.on_events and frames.shape[2:] != dataset.shape:
            return Events.from_bits(frames, math.prod(dataset.shape))
        if config.on_events:  # several events at a site within a step are one spike
            return Events.from_dense(frames > 0)
        values = frames.to(torch.float32, memory_format=torch.contiguous_format)
        return values if dataset.scale == 1 else values * dataset.scale
    encoding = poisson if config.encoding == "poisson" else direct
    x = encoding(inputs / 255, config.num_steps)[:, share]
    return Events.from_dense(x) if config.on_events else x


@dataclass(eq=False, repr=False)
class EvalBatches:
    """All examples in order, in batches of at most `batch_size`.

    Args:
        packed: leave event frames packed.
    """

    examples: Examples
    batch_size: int
    device: torch.device = CPU
    packed: bool = False

    def __post_init__(self) -> None:
        self.examples = place(self.examples, self.device)

    def __len__(self) -> int:
        return -(-len(self.examples) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        starts = range(0, len(self.examples), self.batch_size)
        return self._load(slice(start, start + self.batch_size) for start in starts)

    def _load(self, chosen: Iterable[Tensor | slice]) -> Iterator[Batch]:
        """Yield the batches of the chosen rows, prefetched if they are on another device."""
        if self.examples.labels.device.type == self.device.type:
            yield from map(self._fetch, chosen)
            return
        waiting: deque[Future[Batch]] = deque()
        with ThreadPoolExecutor(1) as thread:
            for rows in chosen:
                waiting.append(thread.submit(self._fetch, rows))
                if len(waiting) > PREFETCHED_BATCHES:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _fetch(self, rows: Tensor | slice) -> Batch:
        batch = self.examples[rows]
        if batch.labels.device.type != self.device.type:
            batch = batch.to(self.device, non_blocking=True)
        return contents(batch, self.packed), batch.labels


@dataclass(kw_only=True, eq=False, repr=False)
class TrainBatches(EvalBatches):
    """One epoch of shuffled batches per iteration, from the current position of the run.

    The number of optimizer steps done determines epoch and batch, so checkpoints need no state of
    this object. An incomplete last batch is dropped; each epoch is reshuffled.

    Args:
        batch_size: at most `len(examples)`.
        steps_done: returns the number of optimizer steps done so far.
    """

    seed: int
    steps_done: Callable[[], int]

    def __len__(self) -> int:
        return len(self.examples) // self.batch_size

    def __iter__(self) -> Iterator[Batch]:
        epoch, first = divmod(self.steps_done(), len(self))
        shuffled = order(len(self.examples), self.seed, epoch).to(self.examples.labels.device)
        return self._load(shuffled.split(self.batch_size)[first : len(self)])
