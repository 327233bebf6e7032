"""Batches of examples: those of a training step, in an order that the seed decides.

A batch is (inputs, labels): the bytes of images `[B, C, H, W]` or of event frames `[B, T, ...]`, on
the device of the run. A set that takes up little of a GPU's memory lies there as a whole, so that
no batch has to come; of any other a thread fetches the next batches while a step runs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from spikefuse.data import Examples, Frames
from spikefuse.train.randomness import order

Batch = tuple[Tensor, Tensor]
CPU = torch.device("cpu")
# Largest share of a GPU's free memory that a set of examples may take.
SHARE = 0.25
# Batches that are fetched in advance.
AHEAD = 3


def place(examples: Examples, device: torch.device) -> Examples:
    """The set on a GPU, if it has room enough; in any other case the set as it is."""
    if device.type != "cuda" or examples.nbytes > SHARE * torch.cuda.mem_get_info(device)[0]:
        return examples
    return examples.to(device)


def contents(batch: Examples, packed: bool) -> Tensor:
    """The inputs of a batch: bytes, or `packed` those of event frames as they are kept."""
    return batch.packed if packed and isinstance(batch, Frames) else batch.pixels


def fetched(
    examples: Examples,
    chosen: Iterable[Tensor | slice],
    device: torch.device,
    packed: bool = False,
) -> Iterator[Batch]:
    """The batches of the chosen rows, from wherever the set lies; `packed` as their own bytes."""

    def fetch(rows: Tensor | slice) -> Batch:
        batch = examples[rows]
        if batch.labels.device.type != device.type:
            batch = batch.to(device, non_blocking=True)
        return contents(batch, packed), batch.labels

    if examples.labels.device.type == device.type:
        yield from map(fetch, chosen)
        return
    waiting: deque[Future[Batch]] = deque()
    with ThreadPoolExecutor(1) as thread:
        for rows in chosen:
            waiting.append(thread.submit(fetch, rows))
            if len(waiting) > AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class TrainBatches:
    """One epoch of shuffled batches per iteration, from wherever the run stands.

    The position is not counted here: epoch and batch follow from the number of optimizer steps
    done, so that a resumed run needs no state of this object. The images of an incomplete last
    batch are left out; the next epoch shuffles anew.

    Args:
        images: the training examples.
        batch_size: images per batch, at most `len(images)`.
        seed: the run's seed.
        steps_done: number of optimizer steps done so far.
        device: where the batches are to be.
        packed: event frames stay packed.
    """

    def __init__(
        self,
        images: Examples,
        batch_size: int,
        seed: int,
        steps_done: Callable[[], int],
        device: torch.device = CPU,
        packed: bool = False,
    ) -> None:
        self.images, self.batch_size, self.device = images, batch_size, device
        self.packed = packed
        self.seed, self.steps_done = seed, steps_done

    def __len__(self) -> int:
        return len(self.images) // self.batch_size

    def __iter__(self) -> Iterator[Batch]:
        epoch, first = divmod(self.steps_done(), len(self))
        shuffled = order(len(self.images), self.seed, epoch).to(self.images.labels.device)
        chosen = shuffled.split(self.batch_size)[first : len(self)]
        yield from fetched(self.images, chosen, self.device, self.packed)


class EvalBatches:
    """All examples in order, in batches of at most `batch_size`."""

    def __init__(
        self,
        images: Examples,
        batch_size: int,
        device: torch.device = CPU,
        packed: bool = False,
    ) -> None:
        self.images, self.batch_size, self.device = images, batch_size, device
        self.packed = packed

    def __len__(self) -> int:
        return -(-len(self.images) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        starts = range(0, len(self.images), self.batch_size)
        chosen = (slice(start, start + self.batch_size) for start in starts)
        return fetched(self.images, chosen, self.device, self.packed)


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
