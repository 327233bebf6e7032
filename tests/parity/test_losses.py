"""Losses, metrics and encodings: those of snnTorch and SpikingJelly give the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spikefuse.nn import encode, losses, metrics

REASON = "SpikingJelly or snnTorch is not installed: see CONTRIBUTING.md"
theirs = pytest.importorskip("snntorch.functional", reason=REASON)
spikegen = pytest.importorskip("snntorch.spikegen", reason=REASON)
functional = pytest.importorskip("spikingjelly.activation_based.functional", reason=REASON)
encoding = pytest.importorskip("spikingjelly.activation_based.encoding", reason=REASON)

T, B, N = 10, 8, 6
TARGET = torch.arange(B) % N


def spikes() -> Tensor:
    """Of neurons that all fire, since snnTorch takes silent ones for those that fire last."""
    x = torch.rand(T, B, N, generator=torch.Generator().manual_seed(0))
    s = (x < 0.3).float()
    s[-1] = torch.where(s.any(0), s[-1], 1.0)
    return s.requires_grad_()


def assert_same(ours: Tensor, x: Tensor, other: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(ours, other.reshape(()))
    torch.testing.assert_close(*(torch.autograd.grad(a, b)[0] for a, b in ((ours, x), (other, y))))


LOSSES = {
    "ce_count": (losses.ce_count, theirs.ce_count_loss()),
    "ce_rate": (losses.ce_rate, theirs.ce_rate_loss()),
    "ce_max_membrane": (losses.ce_max_membrane, theirs.ce_max_membrane_loss()),
    "mse_count": (
        lambda s, y: losses.mse_count(s, y, 0.8, 0.2),
        theirs.mse_count_loss(correct_rate=0.8, incorrect_rate=0.2),
    ),
    "mse_membrane": (
        lambda s, y: losses.mse_membrane(s, y, 1.25, 0.25),
        theirs.mse_membrane_loss(on_target=1.25, off_target=0.25),
    ),
    "ce_temporal": (losses.ce_temporal, theirs.ce_temporal_loss()),
    "mse_temporal": (
        lambda s, y: losses.mse_temporal(s, y, 2, 7),
        theirs.mse_temporal_loss(on_target=2, off_target=7),
    ),
    "l1_activity": (
        lambda s, y: losses.l1_activity(s),
        lambda s, y: theirs.reg.l1_rate_sparsity(1 / s.numel())(s),
    ),
    "population code": (
        lambda s, y: losses.ce_count(losses.pool_population(s, 3), y % 3),
        lambda s, y: theirs.ce_count_loss(population_code=True, num_classes=3)(s, y % 3),
    ),
    "count of a population code": (
        lambda s, y: losses.mse_count(losses.pool_population(s, 3), y % 3, 2 * 0.8, 2 * 0.2),
        lambda s, y: theirs.mse_count_loss(0.8, 0.2, True, num_classes=3)(s, y % 3),
    ),
    "SpikingJelly's TET": (losses.ce_rate, functional.temporal_efficient_training_cross_entropy),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    ours, other = LOSSES[name]
    x, y = spikes(), spikes()
    if "membrane" in name:  # maxima of potentials are unique
        x, y = (
            torch.randn(T, B, N, generator=torch.Generator().manual_seed(1)).requires_grad_()
            for _ in range(2)
        )
    assert_same(ours(x, TARGET), x, other(y, TARGET.clone()), y)


def test_accuracies():
    s = spikes().detach()
    first = losses.first_spike_time(s).argmin(-1)
    for target in (TARGET, first, torch.where(TARGET > 2, TARGET, first)):
        by_rate, by_first = (
            theirs.accuracy_rate(s, target).item(),
            theirs.accuracy_temporal(s, target).item(),
        )
        assert metrics.accuracy_by_rate(s, target).item() == pytest.approx(by_rate)
        assert metrics.accuracy_by_first_spike(s, target).item() == pytest.approx(by_first)
    assert by_first > 0.3


def test_latency():
    x = torch.rand(5, 40, generator=torch.Generator().manual_seed(0))
    y = spikegen.latency(x, 9, threshold=0.1, clip=True, normalize=True, linear=True)
    assert torch.equal(encode.latency(x, 9, threshold=0.1), y)
    y = spikegen.latency(x, 9, threshold=0.1, tau=4, clip=True, bypass=True)
    assert torch.equal(encode.latency(x, 9, tau=4, threshold=0.1), y)
    assert torch.equal(encode.latency(x, 9), encoding.LatencyEncoder(9).single_step_encode(x))


def test_delta():
    x = torch.randn(12, 3, 4, generator=torch.Generator().manual_seed(0))
    for signed in (False, True):
        y = spikegen.delta(x, 0.5, padding=True, off_spike=signed)
        assert torch.equal(encode.delta(x, 0.5, signed), y)


def test_population():
    x = torch.rand(5, 3, generator=torch.Generator().manual_seed(0))
    y = encoding.PopEncoder(3, 4, 7, (-0.5, 1.5), 0.3)(x)
    ours = encode.direct(encode.population(x, 4, -0.5, 1.5, 0.3), 7)
    torch.testing.assert_close(ours, y)


def test_poisson():
    x = torch.tensor([-0.3, 0.0, 0.2, 0.7, 1.0, 1.4])
    for draw in (lambda: encode.poisson(x, 20000), lambda: spikegen.rate(x, 20000)):
        torch.testing.assert_close(draw().mean(0), x.clamp(0, 1), atol=0.02, rtol=0)
