"""Accuracies by rate and by first spike, with ties and silent samples."""

from __future__ import annotations

import torch

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
