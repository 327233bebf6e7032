"""Batches contain every image once, start anywhere, and come from any device."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch

from spikefuse.data import Frames, Images
from spikefuse.data.frames import pack
from spikefuse.train.batches import (
    MEMORY_FRACTION,
    EvalBatches,
    TrainBatches,
    place,
)


def numbered(count: int) -> Images:
    return Images(
        torch.zeros(count, 1, 2, 2, dtype=torch.uint8), torch.arange(count, dtype=torch.int64)
    )


def labels(batches: TrainBatches | EvalBatches) -> list[list[int]]:
    return [y.tolist() for _, y in batches]


def flat(lists: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


def test_epoch_has_each_image_at_most_once() -> None:
    batches = TrainBatches(numbered(23), 5, seed=0, steps_done=lambda: 0)
    epoch = labels(batches)
    assert len(epoch) == len(batches) == 4
    seen = flat(epoch)
    assert len(set(seen)) == len(seen) == 20


def test_iteration_starts_at_the_current_step() -> None:
    step = 0
    batches = TrainBatches(numbered(23), 5, seed=0, steps_done=lambda: step)
    epochs = []
    for step in (0, 4, 8):  # noqa: B007 - read by the lambda
        epochs += labels(batches)
    for step in range(12):
        rest = labels(batches)
        assert rest == epochs[step : (step // 4 + 1) * 4]
    assert epochs[0] != epochs[4]


def test_evaluation_covers_all_examples_in_order() -> None:
    batches = EvalBatches(numbered(23), 5)
    assert len(batches) == 5
    assert flat(labels(batches)) == list(range(23))


@pytest.mark.parametrize("make", [TrainBatches, EvalBatches])
def test_prefetched_batches_are_equal(make: type) -> None:
    """With a dataset on another device than the run, here the meta device."""
    meta = torch.device("meta")
    options = {"seed": 0, "steps_done": lambda: 0} if make is TrainBatches else {}
    here = list(make(numbered(23), 5, **options))
    there = make(Elsewhere(numbered(23)), 5, **options, device=meta)
    assert [y.tolist() for _, y in here] == [y.tolist() for y in Elsewhere.moved(there)]


class Elsewhere:
    """Examples that check the thread in which they are moved."""

    def __init__(self, images: Images) -> None:
        self.images, self.labels, self.pixels = images, images.labels, images.pixels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, rows: torch.Tensor | slice) -> Elsewhere:
        return Elsewhere(self.images[rows])

    def to(self, device: torch.device, non_blocking: bool = False) -> Elsewhere:
        assert threading.current_thread() is not threading.main_thread()
        return self

    @staticmethod
    def moved(batches: TrainBatches | EvalBatches) -> list[torch.Tensor]:
        return [y for _, y in batches]


def test_frames_are_copied_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copied bytes are an eighth of the frames in float32."""
    shape, steps, count = (2, 34, 34), 32, 6
    counts = np.random.default_rng(0).integers(0, 16, (count * steps, *shape)).astype(np.uint8)
    packed = torch.from_numpy(pack(counts.reshape(count * steps, -1), 4)).view(count, steps, -1)
    moved: list[int] = []
    original = Frames.to

    def to(self: Frames, device: torch.device, non_blocking: bool = False) -> Frames:
        moved.append(self.packed.nbytes)
        return original(self, device, non_blocking)

    monkeypatch.setattr(Frames, "to", to)
    frames = Frames(packed, torch.arange(count), shape, 4)
    batches = list(EvalBatches(frames, 2, torch.device("meta")))
    assert [x.shape for x, _ in batches] == [(2, steps, *shape)] * 3
    assert [8 * size for size in moved] == [4 * x.numel() for x, _ in batches]


def test_errors_in_the_prefetch_thread_propagate() -> None:
    class Broken(Elsewhere):
        def __getitem__(self, rows: torch.Tensor | slice) -> Elsewhere:
            raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError, match="on purpose"):
        list(EvalBatches(Broken(numbered(5)), 2, torch.device("meta")))


def test_small_datasets_are_placed_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    images, gpu, moved = numbered(8), torch.device("cuda", 0), []
    monkeypatch.setattr(Images, "to", lambda self, device: moved.append(device) or self)
    free = {"bytes": int(images.nbytes / MEMORY_FRACTION)}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free["bytes"], 0))
    assert place(images, torch.device("cpu")) is images
    assert moved == []
    place(images, gpu)
    assert moved == [gpu]
    free["bytes"] -= 8
    assert place(images, gpu) is images
    assert moved == [gpu]
