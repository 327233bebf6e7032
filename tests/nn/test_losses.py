"""Losses over time: values and gradients against loops in Python, and errors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import spikefuse as sf
from spikefuse.nn import losses

T, B, N = 6, 4, 3
TARGET = torch.tensor([2, 0, 1, 2])


def potentials() -> Tensor:
    return torch.randn(T, B, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def spikes() -> Tensor:
    """With a silent neuron, one that fires at the last step only, and one that always fires."""
    s = (potentials() > 0.3).double()
    s[:, 0, 0], s[:, 1, 1], s[-1, 1, 1], s[:, 2, 2] = 0, 0, 1, 1
    return s


def cross_entropy(logits: list[float], label: int) -> float:
    return math.log(sum(math.exp(value) for value in logits)) - logits[label]


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def first(train: list[float]) -> int:
    return train.index(1.0) if 1.0 in train else T


def trains(x: Tensor) -> list[list[list[float]]]:
    """By sample and neuron."""
    return x.permute(1, 2, 0).tolist()


LABELS = TARGET.tolist()
PAIRS = [(b, n) for b in range(B) for n in range(N)]
EXPECTED = {
    "ce_count": (
        lambda: losses.ce_count(spikes(), TARGET),
        lambda s: mean(cross_entropy([sum(t) for t in s[b]], LABELS[b]) for b in range(B)),
    ),
    "ce_rate": (
        lambda: losses.ce_rate(spikes(), TARGET),
        lambda s: mean(
            cross_entropy([train[t] for train in s[b]], LABELS[b])
            for b in range(B)
            for t in range(T)
        ),
    ),
    "mse_count": (
        lambda: losses.mse_count(spikes(), TARGET, 0.75, 0.1),
        lambda s: mean(
            (sum(s[b][n]) - T * (0.75 if n == LABELS[b] else 0.1)) ** 2 / T for b, n in PAIRS
        ),
    ),
    "ce_temporal": (
        lambda: losses.ce_temporal(spikes(), TARGET),
        lambda s: mean(cross_entropy([-first(t) for t in s[b]], LABELS[b]) for b in range(B)),
    ),
    "mse_temporal": (
        lambda: losses.mse_temporal(spikes(), TARGET, 1),
        lambda s: mean(
            ((first(s[b][n]) - (1 if n == LABELS[b] else T)) / T) ** 2 for b, n in PAIRS
        ),
    ),
    "l1_activity": (
        lambda: losses.l1_activity(spikes()),
        lambda s: mean(v for b, n in PAIRS for v in s[b][n]),
    ),
    "l2_activity": (
        lambda: losses.l2_activity(spikes()),
        lambda s: mean(mean(s[b][n]) ** 2 for b, n in PAIRS),
    ),
    "rate_bounds": (
        lambda: losses.rate_bounds(spikes(), 0.3, 0.4),
        lambda s: mean(
            max(0.0, 0.3 - r, r - 0.4) ** 2
            for r in (mean(mean(s[b][n]) for b in range(B)) for n in range(N))
        ),
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_losses_of_spikes(name: str) -> None:
    loss, expected = EXPECTED[name]
    assert loss().item() == pytest.approx(expected(trains(spikes())), rel=1e-12)
    assert loss().item() > 0.01


def test_losses_of_potentials() -> None:
    v = trains(potentials())
    highest = mean(cross_entropy([max(t) for t in v[b]], LABELS[b]) for b in range(B))
    assert losses.ce_max_membrane(potentials(), TARGET).item() == pytest.approx(highest)
    square = mean((u - (2 if n == LABELS[b] else -1)) ** 2 for b, n in PAIRS for u in v[b][n])
    assert losses.mse_membrane(potentials(), TARGET, 2, -1).item() == pytest.approx(square)


def test_first_spike_time_and_its_gradient() -> None:
    s = spikes().requires_grad_()
    times = losses.first_spike_time(s)
    weights = torch.arange(1.0, B * N + 1, dtype=torch.float64).view(B, N)
    (grad,) = torch.autograd.grad((times * weights).sum(), s)
    expected = torch.zeros_like(grad)
    for b, n in PAIRS:
        time = first(trains(s)[b][n])
        assert times[b, n] == time
        expected[min(time, T - 1), b, n] = -weights[b, n]
    assert torch.equal(grad, expected)
    assert {0.0, T - 1.0, float(T)} <= set(times.flatten().tolist())


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by jvp
def test_transforms_of_the_time_of_the_first_spike() -> None:
    def loss(s: Tensor, target: Tensor) -> Tensor:
        return losses.ce_temporal(s[:, None], target[None])

    s = spikes().requires_grad_()
    (expected,) = torch.autograd.grad(losses.ce_temporal(s, TARGET), s)
    by_sample = torch.func.vmap(torch.func.grad(loss), (1, 0), 1)(s.detach(), TARGET) / B
    torch.testing.assert_close(by_sample, expected)
    _, slope = torch.func.jvp(lambda s: losses.ce_temporal(s, TARGET), (s,), (potentials(),))
    torch.testing.assert_close(slope, (expected * potentials()).sum())


def test_the_regularization_of_temporal_efficient_training() -> None:
    v, square = potentials(), (potentials() - 1.5).square().mean().item()
    expected = 0.95 * losses.ce_rate(v, TARGET).item() + 0.05 * square
    assert losses.ce_rate(v, TARGET, 0.05, level=1.5).item() == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"weight is 2: expected a number in \[0, 1\]"):
        losses.ce_rate(v, TARGET, 2)


@pytest.mark.parametrize("name", [n for n in EXPECTED if n != "rate_bounds"] + ["ce_max_membrane"])
def test_training_lowers_the_loss(name: str) -> None:
    """Through neurons, in the direction of the gradient."""
    torch.manual_seed(0)
    net = sf.Temporal(torch.nn.Sequential(torch.nn.Linear(8, N), sf.LIF(0.8, 0.5)))
    x, loss = torch.rand(T, B, 8), getattr(losses, name)
    arguments = () if "activity" in name else (TARGET,)
    optimizer, history = torch.optim.Adam(net.parameters(), 0.05), []
    for _ in range(20):
        value = loss(net(x, impl="reference"), *arguments)
        history.append(value.item())
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    assert min(history[10:]) < history[0]


def test_long_sequences_in_bfloat16() -> None:
    """Whose own counts end at 256."""
    s = torch.zeros(301, 1, 2, dtype=torch.bfloat16)
    s[299:, 0, 0] = 1
    s[: 2 * 130 - 1, 0, 1] = 1
    x, target = s.requires_grad_(), torch.tensor([1])
    assert losses.first_spike_time(x).tolist() == [[299, 0]]
    loss = losses.mse_count(x, target) + losses.ce_temporal(x, target)
    expected = ((301 - 259) ** 2 + 2**2) / 2 / 301
    assert loss.item() == pytest.approx(expected)
    loss.backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    assert losses.pool_population(s.detach().sum(0, dtype=torch.float32), 1).item() == 261


def test_populations_are_summed() -> None:
    x = torch.arange(12.0).view(1, 2, 6)
    assert losses.pool_population(x, 3).tolist() == [[[1, 5, 9], [13, 17, 21]]]


def test_rates_of_a_population_are_those_of_its_neurons() -> None:
    """Of two neurons, each of which is to fire in 0.75 or 0.25 of 4 steps: 6 and 2 spikes."""
    s = torch.zeros(4, 1, 4)
    s[:3, :, :2] = 1
    s[0, :, 2] = 1
    counts = losses.pool_population(s, 2)
    assert losses.mse_count(counts, torch.tensor([0]), 2 * 0.75, 2 * 0.25).item() == 1 / 2 / 4


def test_errors_say_what_was_expected() -> None:
    x = torch.rand(T, B, N)
    with pytest.raises(ValueError, match=r"shape \[6, 4\]: expected \[T, B, N\]"):
        losses.ce_count(x[..., 0], TARGET)
    with pytest.raises(
        ValueError, match=r"target is torch.int64 \[3\]: expected .* 4 samples, \[4\]"
    ):
        losses.mse_temporal(x, TARGET[:3])
    with pytest.raises(ValueError, match="num_classes is 2 for 3 neurons: expected a divisor"):
        losses.pool_population(x, 2)
    with pytest.raises(ValueError, match=r"lower is 0\.5 and upper 0\.2"):
        losses.rate_bounds(x, 0.5, 0.2)


CLASSES = {
    "ce_count": losses.ce_count,
    "ce_rate": losses.ce_rate,
    "ce_max_membrane": losses.ce_max_membrane,
    "mse_count": losses.mse_count,
    "mse_membrane": losses.mse_membrane,
    "ce_temporal": losses.ce_temporal,
    "mse_temporal": losses.mse_temporal,
}


@pytest.mark.parametrize("name", CLASSES)
def test_class_probabilities(name: str) -> None:
    """Certain classes count as indices do; the cross-entropy of a mixture is that of its parts."""
    loss = CLASSES[name]
    first, second = TARGET, TARGET.roll(1)
    certain = [torch.nn.functional.one_hot(target, N).float() for target in (first, second)]
    values = [loss(spikes(), target) for target in (first, second)]
    for value, target in zip(values, certain, strict=True):
        torch.testing.assert_close(loss(spikes(), target), value)
    mixed = loss(spikes(), 0.25 * certain[0] + 0.75 * certain[1])
    mean_of_both = 0.25 * values[0] + 0.75 * values[1]
    if name.startswith("ce"):
        torch.testing.assert_close(mixed, mean_of_both)
    else:  # the square of a mean is less than the mean of squares
        assert 0 < mixed < mean_of_both
    with pytest.raises(
        ValueError, match=r"target is torch.float32 \[4, 2\]: expected a class index"
    ):
        loss(spikes(), certain[0][:, :2])


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_whole_numbers(name: str, dtype: torch.dtype) -> None:
    expected = CLASSES[name](spikes().float(), TARGET)
    assert torch.equal(CLASSES[name](spikes().to(dtype), TARGET.to(dtype)), expected)
    with pytest.raises(TypeError, match=r"target is torch\.bool: expected .* class indices"):
        CLASSES[name](spikes(), TARGET.bool())


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("wrong", [-1, N, 1000])
def test_classes_out_of_range(name: str, wrong: int) -> None:
    target = torch.tensor([-100, 0, wrong, 1])
    message = rf"target has class {wrong}: expected 0 to {N - 1}, for {N} neurons, or -100 for"
    with pytest.raises(ValueError, match=message):
        CLASSES[name](spikes(), target)


@pytest.mark.parametrize("name", CLASSES)
def test_without_any_class_the_loss_is_that_of_torch(name: str) -> None:
    target = torch.full((4,), -100)
    assert torch.nn.functional.cross_entropy(torch.rand(4, N), target).isnan()
    assert CLASSES[name](spikes(), target).isnan()


@pytest.mark.parametrize("name", CLASSES)
def test_samples_without_a_class_are_left_out(name: str) -> None:
    torch.manual_seed(0)
    x, target = (torch.rand(5, 3, 4) > 0.5).float(), torch.tensor([1, -100, 2])
    function, lengths = CLASSES[name], torch.tensor([5, 2, 3])
    torch.testing.assert_close(function(x, target), function(x[:, ::2], target[::2]))
    expected = function(x[:, ::2], target[::2], lengths=lengths[::2])
    torch.testing.assert_close(function(x, target, lengths=lengths), expected)
    x.requires_grad_()
    function(x, target).backward()
    assert x.grad is not None
    assert x.grad[:, ::2].any()
    assert not x.grad[:, 1].any()
