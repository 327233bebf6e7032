"""Encodings: rates, reproducibility, no copies, errors."""

from __future__ import annotations

import math

import pytest
import torch

import spikefuse as sf
from spikefuse.nn.encode import delta, direct, latency, poisson, population


def test_encodings_need_no_import_of_their_own() -> None:
    assert sf.nn.encode.direct is direct


def test_direct_repeats_without_a_copy() -> None:
    x = torch.rand(3, 2, 5)
    y = direct(x, 7)
    assert y.shape == (7, 3, 2, 5)
    assert y.stride(0) == 0
    assert y.data_ptr() == x.data_ptr()
    assert all(torch.equal(step, x) for step in y)


def test_poisson_rates() -> None:
    x = torch.tensor([-0.5, 0.0, 0.1, 0.5, 0.9, 1.0, 1.5])
    y = poisson(x, 20_000, torch.Generator().manual_seed(0))
    assert set(y.unique().tolist()) == {0.0, 1.0}
    error = (y.mean(0) - x.clamp(0, 1)).abs()
    deviation = (x.clamp(0, 1) * (1 - x.clamp(0, 1)) / 20_000).sqrt()
    assert (error <= 4 * deviation).all()


def test_pixels_are_no_probabilities() -> None:
    with pytest.raises(ValueError, match="x is up to 255: expected probabilities, such as pixels"):
        poisson(torch.tensor([[0.0, 255.0]]), 3)
    with pytest.raises(ValueError, match="x is up to nan: expected probabilities"):
        poisson(torch.tensor([[0.0, torch.nan]]), 3)


def test_poisson_is_a_function_of_the_generator() -> None:
    x = torch.rand(4, 9)
    first = poisson(x, 5, torch.Generator().manual_seed(1))
    assert torch.equal(first, poisson(x, 5, torch.Generator().manual_seed(1)))
    assert not torch.equal(first, poisson(x, 5, torch.Generator().manual_seed(2)))
    torch.manual_seed(1)
    assert torch.equal(first, poisson(x, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_poisson_preserves_the_dtype_and_draws_finely(dtype: torch.dtype) -> None:
    x = torch.full((100_000,), 0.002, dtype=dtype)  # below the step of a bfloat16 draw
    y = poisson(x, 2, torch.Generator().manual_seed(0))
    assert y.dtype == dtype
    assert abs(y.double().mean().item() - 0.002) < 0.0005


def test_errors_say_what_was_expected() -> None:
    x = torch.rand(3)
    for steps in (0, -1, 2.5):
        with pytest.raises(ValueError, match="expected an integer of at least 1"):
            direct(x, steps)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no dimensions"):
        poisson(torch.tensor(0.5), 3)
    with pytest.raises(TypeError, match=r"expected a tensor \[B, \.\.\.\]"):
        poisson([0.5], 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="such as pixels / 255"):
        poisson(torch.ones(3, dtype=torch.uint8), 3)
    with pytest.raises(ValueError, match="generator is on cpu, x on meta"):
        poisson(torch.rand(3, device="meta"), 2, torch.Generator())


def test_linear_latency() -> None:
    x = torch.tensor([[1.0, 0.75, 0.5, 0.1, 0.0]])
    y = latency(x, 5)
    assert y.shape == (5, 1, 5)
    assert torch.equal(y.sum(0), torch.ones(1, 5))
    assert y.argmax(0).tolist() == [[0, 1, 2, 4, 4]]
    assert latency(x, 5, threshold=0.2).sum(0).tolist() == [[1, 1, 1, 0, 0]]


def test_latency_of_a_membrane() -> None:
    """A leaky membrane under a constant current x, integrated in small steps, crosses then."""
    tau, threshold, num_steps = 5.0, 0.2, 12
    x = torch.tensor([[1.0, 0.5, 0.35, 0.21, 0.2, 0.1, 0.0]], dtype=torch.float64)
    v, crossed, dt = torch.zeros_like(x), torch.full_like(x, float("inf")), 1e-3
    for i in range(int(num_steps / dt)):
        v += dt / tau * (x - v)
        crossed = torch.where((v >= threshold) & crossed.isinf(), (i + 1) * dt, crossed)
    y = latency(x, num_steps, tau, threshold)
    assert y.dtype == torch.float64
    for n, time in enumerate(crossed[0].tolist()):
        steps = y[:, 0, n].nonzero().flatten().tolist()
        assert steps == ([round(time)] if time < num_steps - 0.5 else [])
    assert y.sum() == 3


def test_delta() -> None:
    x = torch.tensor([0.5, 0.6, 0.9, 0.9, 0.2, 0.3]).view(-1, 1)
    assert delta(x, 0.2).flatten().tolist() == [0, 0, 1, 0, 0, 0]
    assert delta(x, 0.2, signed=True).flatten().tolist() == [0, 0, 1, 0, -1, 0]


def test_population() -> None:
    x = torch.tensor([[0.0, 0.5], [1.0, 0.25]])
    y = population(x, 3, width=0.2)
    expected = [math.exp(-((v - c) ** 2) / 0.08) for v in (0, 0.5, 1, 0.25) for c in (0, 0.5, 1)]
    assert y.shape == (2, 6)
    assert y.flatten().tolist() == pytest.approx(expected)
    assert population(x, 3)[0, 1].item() == pytest.approx(math.exp(-0.5))  # width 0.5


def test_errors_of_further_encodings() -> None:
    x = torch.rand(2, 3)
    with pytest.raises(ValueError, match=r"x is in \[.*, 2\]: expected values in \[0, 1\]"):
        latency(torch.tensor([0.0, 2.0]), 4)
    with pytest.raises(TypeError, match="expected intensities"):
        latency(torch.ones(3, dtype=torch.long), 4)
    with pytest.raises(ValueError, match=r"tau, threshold are 2.0, 0.0: expected positive"):
        latency(x, 4, tau=2.0)
    with pytest.raises(ValueError, match="threshold is 0: expected a positive number"):
        delta(x, 0)
    with pytest.raises(ValueError, match="num_neurons is 1: expected an integer of at least 2"):
        population(x, 1)
    with pytest.raises(ValueError, match="expected low < high"):
        population(x, 3, 1.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_whole_numbers(dtype: torch.dtype) -> None:
    """Differences of bytes would wrap around, and centres between whole numbers be rounded."""
    x = torch.tensor([10, 5, 20, 127, 0], dtype=dtype).view(-1, 1)
    y = delta(x, 5, signed=True)
    assert y.dtype == torch.float32
    assert y.flatten().tolist() == [0, -1, 1, 1, -1]
    assert torch.equal(delta(x, 5), delta(x.float(), 5))
    assert torch.equal(population(x, 4, 0, 128), population(x.float(), 4, 0, 128))
    assert torch.equal(direct(x, 2)[1], x)
    with pytest.raises(TypeError, match="complex64: expected real numbers"):
        delta(x.to(torch.complex64), 5)
