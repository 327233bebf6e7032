"""Losses over time against their definitions, and the learning-rate schedules."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from spikefuse.train.config import LOSSES, TrainConfig
from spikefuse.train.losses import learning_rate, readout, sequence_loss


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses(smoothing: float) -> None:
    torch.manual_seed(0)
    outputs, labels = torch.randn(5, 3, 7), torch.tensor([6, 0, 2])

    def cross_entropy(logits: torch.Tensor) -> torch.Tensor:
        target = F.one_hot(labels, 7) * (1 - smoothing) + smoothing / 7
        return -(target * logits.log_softmax(1)).sum(1).mean()

    expected = {
        "mean": cross_entropy(outputs.mean(0)),
        "last": cross_entropy(outputs[-1]),
        "every": torch.stack([cross_entropy(y) for y in outputs]).mean(),
    }
    assert set(expected) == set(LOSSES)
    for name, value in expected.items():
        torch.testing.assert_close(sequence_loss(outputs, labels, name, smoothing), value)


def test_readout_is_what_the_loss_is_of() -> None:
    outputs = torch.randn(5, 3, 7, dtype=torch.bfloat16)
    assert torch.equal(readout(outputs, "last"), outputs[-1].float())
    for name in ("mean", "every"):
        torch.testing.assert_close(readout(outputs, name), outputs.float().mean(0))


def rates(steps: int = 10, **options: object) -> list[float]:
    config = TrainConfig(lr=0.5, epochs=4, **options)  # type: ignore[arg-type]
    return [learning_rate(config, step, steps) for step in range(4 * steps)]


def test_constant() -> None:
    assert rates() == [0.5] * 40


def test_warmup_rises_to_the_rate() -> None:
    found = rates(warmup=0.5)
    assert found[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert found[5:] == [0.5] * 35


def test_cosine_falls_to_almost_nothing() -> None:
    found = rates(schedule="cosine", warmup=1)
    assert found[9] == found[10] == 0.5
    assert found[25] == pytest.approx(0.25)
    assert found[10:] == sorted(found[10:], reverse=True)
    assert found[-1] == pytest.approx(0.25 * (1 + math.cos(math.pi * 29 / 30)))


def test_a_rate_is_a_float32() -> None:
    config = TrainConfig(lr=1e-3)
    rate = learning_rate(config, 0, 10)
    assert rate == pytest.approx(1e-3)
    assert torch.tensor(rate, dtype=torch.float32).item() == rate
