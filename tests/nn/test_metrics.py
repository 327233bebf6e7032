"""Accuracies by rate and by first spike, with ties and silent samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spikefuse.nn.metrics import accuracy_by_first_spike, accuracy_by_rate

# [T, B, N]: by rate 1, 0 (tie), 0 (silent), 2; by first spike 2, 0 (tie), none, 2.
SPIKES = torch.tensor(
    [
        [[0, 0, 1], [1, 1, 0], [0, 0, 0], [0, 0, 1]],
        [[1, 1, 0], [0, 0, 1], [0, 0, 0], [0, 0, 1]],
        [[0, 1, 0], [0, 0, 0], [0, 0, 0], [1, 0, 0]],
    ]
).float()


def test_accuracies() -> None:
    for n, by_rate, by_first in ((0, 0.5, 0.25), (1, 0.25, 0.0), (2, 0.25, 0.5)):
        target = torch.full((4,), n)
        assert accuracy_by_rate(SPIKES, target) == by_rate
        assert accuracy_by_first_spike(SPIKES, target) == by_first


@pytest.mark.parametrize("accuracy", [accuracy_by_rate, accuracy_by_first_spike])
def test_ignored_samples(accuracy: Callable[[Tensor, Tensor], Tensor]) -> None:
    target = torch.tensor([1, 0, -100, 2])
    assert accuracy(SPIKES, target) == accuracy(SPIKES[:, [0, 1, 3]], target[[0, 1, 3]]) > 0.5
    assert accuracy(SPIKES, torch.full((4,), -100)).isnan()
    many = torch.zeros(2, 2, 200)
    many[:, :, 156] = 1  # -100 modulo 256
    assert accuracy(many, torch.tensor([156, 3], dtype=torch.uint8)) == 0.5


@pytest.mark.parametrize("accuracy", [accuracy_by_rate, accuracy_by_first_spike])
@pytest.mark.parametrize(
    ("spikes", "target", "error", "message"),
    [
        (SPIKES, torch.zeros(4, 1, dtype=torch.int64), ValueError, r"shape \[4, 1\]: .* \[4\]"),
        (SPIKES, torch.zeros(1, dtype=torch.int64), ValueError, r"shape \[1\]: .* \[4\]"),
        (SPIKES, torch.tensor(0), ValueError, r"shape \[\]: .* \[4\]"),
        (SPIKES[:, :3], torch.eye(3), TypeError, r"float32: .* target.argmax\(-1\)"),
        (SPIKES, torch.tensor([0, 1, 3, 2]), ValueError, r"class 3: expected 0 to 2, for 3 neuron"),
        (SPIKES, torch.tensor([0, 1, -1, 2]), ValueError, r"class -1: expected 0 to 2"),
        (SPIKES.sum(0), torch.zeros(4, dtype=torch.int64), ValueError, r"\[4, 3\]: .* \[T, B, N\]"),
    ],
)
def test_wrong_targets(
    accuracy: Callable[[Tensor, Tensor], Tensor],
    spikes: Tensor,
    target: Tensor,
    error: type[Exception],
    message: str,
) -> None:
    """A comparison of `[B]` with any of these would broadcast to a wrong number."""
    with pytest.raises(error, match=message):
        accuracy(spikes, target)
