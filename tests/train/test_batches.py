"""Batches: every image once, a start anywhere, and shifted images."""

from __future__ import annotations

import itertools

import torch

from spikefuse.data import Images
from spikefuse.train.batches import EvalBatches, TrainBatches, shifted


def numbered(count: int) -> Images:
    return Images(
        torch.zeros(count, 1, 2, 2, dtype=torch.uint8), torch.arange(count, dtype=torch.int64)
    )


def labels(batches: TrainBatches | EvalBatches) -> list[list[int]]:
    return [y.tolist() for _, y in batches]


def flat(lists: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


def test_an_epoch_has_every_image_at_most_once() -> None:
    batches = TrainBatches(numbered(23), 5, seed=0, steps_done=lambda: 0)
    epoch = labels(batches)
    assert len(epoch) == len(batches) == 4
    seen = flat(epoch)
    assert len(set(seen)) == len(seen) == 20


def test_it_starts_where_the_run_stands() -> None:
    step = 0
    batches = TrainBatches(numbered(23), 5, seed=0, steps_done=lambda: step)
    epochs = []
    for step in (0, 4, 8):  # noqa: B007 - read by the lambda
        epochs += labels(batches)
    for step in range(12):
        rest = labels(batches)
        assert rest == epochs[step : (step // 4 + 1) * 4]
    assert epochs[0] != epochs[4]


def test_evaluation_takes_all_in_order() -> None:
    batches = EvalBatches(numbered(23), 5)
    assert len(batches) == 5
    assert flat(labels(batches)) == list(range(23))


def test_shifted_moves_whole_images() -> None:
    torch.manual_seed(0)
    x = torch.randint(1, 256, (300, 2, 5, 4), dtype=torch.uint8)
    y = shifted(x, 2)
    assert y.shape == x.shape
    assert y.dtype == torch.uint8
    padded = torch.zeros(300, 2, 9, 8, dtype=torch.uint8)
    padded[:, :, 2:7, 2:6] = x
    moves = set()
    for before, after in zip(padded, y, strict=True):
        windows = {(r, c): before[:, r : r + 5, c : c + 4] for r in range(5) for c in range(5)}
        (move,) = [m for m, window in windows.items() if torch.equal(window, after)]
        moves.add(move)
    assert len(moves) == 25
    assert shifted(x, 0) is x
