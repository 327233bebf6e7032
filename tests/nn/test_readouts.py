"""Padded sequences give the readouts, losses, accuracies and rates of unpadded ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import spikefuse as sf
from spikefuse.nn import losses, metrics, readouts

T, N = 6, 3
LENGTHS = torch.tensor([6, 1, 4, 3])
TARGET = torch.tensor([2, 0, 1, 2])
SAMPLES = [*enumerate(LENGTHS.tolist())]


def outputs(padding: float = torch.nan) -> Tensor:
    """Spikes and silent neurons, and padding of a value."""
    x = torch.rand(T, 4, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = (x > 0.6) * x
    x[:, 2, 0], x[:, 1] = 0, 0
    for sample, length in SAMPLES:
        x[length:, sample] = padding
    return x


READOUTS: dict[str, Callable[..., Tensor]] = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "max": lambda x: x.amax(0),
    "last": lambda x: x[-1],
    "first_spike_time": losses.first_spike_time,
}


@pytest.mark.parametrize("name", READOUTS)
def test_readouts(name: str) -> None:
    """Values and gradients are those of each sample alone; those of padding are 0."""
    x = outputs().requires_grad_()
    function = losses.first_spike_time if name == "first_spike_time" else getattr(readouts, name)
    weights = torch.arange(12.0, dtype=torch.float64).view(4, N)
    found = function(x, LENGTHS)
    (grad,) = torch.autograd.grad((found * weights).sum(), x)
    for sample, length in SAMPLES:
        alone = x.detach()[:length, sample : sample + 1].requires_grad_()
        expected = READOUTS[name](alone)
        (by_hand,) = torch.autograd.grad((expected * weights[sample]).sum(), alone)
        torch.testing.assert_close(found[sample : sample + 1], expected)
        torch.testing.assert_close(grad[:length, sample : sample + 1], by_hand)
        assert not grad[length:, sample].any()
    whole = outputs(0.5)
    torch.testing.assert_close(function(whole, torch.full((4,), T)), READOUTS[name](whole))
    torch.testing.assert_close(function(whole), READOUTS[name](whole))


CLASSES: dict[str, Callable[..., Tensor]] = {
    "ce_count": losses.ce_count,
    "ce_rate": partial(losses.ce_rate, weight=0.2, level=0.3),
    "ce_max_membrane": losses.ce_max_membrane,
    "mse_count": partial(losses.mse_count, correct_rate=0.7, incorrect_rate=0.1),
    "mse_membrane": losses.mse_membrane,
    "ce_temporal": losses.ce_temporal,
    "mse_temporal": losses.mse_temporal,
    "accuracy_by_rate": metrics.accuracy_by_rate,
    "accuracy_by_first_spike": metrics.accuracy_by_first_spike,
}
WITHOUT_TARGETS: dict[str, Callable[..., Tensor]] = {
    "l1_activity": losses.l1_activity,
    "l2_activity": losses.l2_activity,
}


@pytest.mark.parametrize("name", CLASSES | WITHOUT_TARGETS)
def test_losses_are_means_over_samples_of_their_own_steps(name: str) -> None:
    function = (CLASSES | WITHOUT_TARGETS)[name]
    arguments: tuple[Any, ...] = (TARGET,) if name in CLASSES else ()
    x, y = outputs().requires_grad_(), outputs().requires_grad_()
    alone = [
        function(y[:length, [sample]], *(a[[sample]] for a in arguments))
        for sample, length in SAMPLES
    ]
    found, expected = function(x, *arguments, lengths=LENGTHS), torch.stack(alone).mean()
    torch.testing.assert_close(found, expected)
    assert found > 0
    if found.requires_grad:
        (grad,), (by_hand,) = torch.autograd.grad(found, x), torch.autograd.grad(expected, y)
        torch.testing.assert_close(grad, by_hand)


def test_rate_bounds() -> None:
    """The rate of a neuron is the mean of its rates in the samples."""
    rates = torch.stack([outputs()[:length, sample].mean(0) for sample, length in SAMPLES]).mean(0)
    expected = ((0.2 - rates).relu().square() + (rates - 0.3).relu().square()).mean()
    found = losses.rate_bounds(outputs(), 0.2, 0.3, LENGTHS)
    torch.testing.assert_close(found, expected)
    assert found > 0


def test_a_network_on_padded_sequences() -> None:
    """Of causal layers, padding changes no earlier step: outputs, records and rates."""
    torch.manual_seed(0)
    net = sf.Temporal(
        nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), sf.LIF(), nn.Linear(8, N), sf.LI(0.9))
    ).eval()
    sequences = [3 * torch.rand(length, 5) for length in LENGTHS]
    x = nn.utils.rnn.pad_sequence(sequences, padding_value=1.0)  # [T, B, 5]
    with sf.record(net, lengths=LENGTHS) as record:
        y = net(x)
    spikes, alone = [], []
    for sequence in sequences:
        with sf.record(net) as single:
            alone.append(net(sequence.unsqueeze(1))[:, 0])
        spikes.append(single["net.2"]["spikes"])
    last = torch.stack([one[-1] for one in alone])
    torch.testing.assert_close(readouts.last(y, LENGTHS), last)
    means = torch.stack([one.mean(0) for one in alone])
    torch.testing.assert_close(readouts.mean(y, LENGTHS), means)
    rate = torch.cat(spikes).mean().item()
    assert record.rates == {"net.2": pytest.approx(rate)}
    assert rate > 0
    assert torch.equal(record["net.2"]["spikes"][:4, 2], spikes[2][:, 0])


def test_sums_and_means_are_precise() -> None:
    x = torch.ones(300, 1, 1, dtype=torch.bfloat16)
    assert readouts.sum(x).item() == 300
    assert readouts.mean(x, torch.tensor([299])).dtype == torch.float32


def test_lengths_of_one_byte() -> None:
    x = torch.arange(300.0).view(300, 1, 1).expand(300, 2, 1)
    for lengths in (
        torch.tensor([255, 3], dtype=torch.uint8),
        torch.tensor([127, 3]).to(torch.int8),
    ):
        assert torch.equal(readouts.last(x, lengths), lengths.float().view(2, 1) - 1)


def test_wrong_lengths() -> None:
    with pytest.raises(ValueError, match=r"lengths is \[0, 1, 2, 7\]: expected steps from 1 to T"):
        readouts.mean(outputs(), torch.tensor([0, 1, 2, 7]))
    with pytest.raises(ValueError, match=r"shape \[3\] for \[6, 4, 3\]: expected \[B\]"):
        losses.ce_count(outputs(), TARGET, LENGTHS[:3])
    with pytest.raises(TypeError, match=r"lengths is torch.float32: expected integers"):
        readouts.last(outputs(), LENGTHS.float())
    for call in (readouts.mean, readouts.last, losses.ce_rate):
        options = {} if call is not losses.ce_rate else {"target": TARGET}
        with pytest.raises(TypeError, match=r"lengths is a list: .* torch.tensor\(lengths\)"):
            call(outputs(), lengths=[1, 2, 3, 4], **options)
