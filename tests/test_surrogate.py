"""Surrogates: the spike, the derivative by hand, its area, and bad widths."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from spikefuse import surrogate
from spikefuse.surrogate import Arctan, FastSigmoid, Rectangle, Sigmoid, Surrogate, Triangle

ALL = [Sigmoid(), Arctan(), FastSigmoid(), Rectangle(), Triangle()]
IDS = [type(s).__name__ for s in ALL]


def derivative(spike: Surrogate, *u: float) -> list[float]:
    """What autograd gives, in float64."""
    x = torch.tensor(u, dtype=torch.float64, requires_grad=True)
    spike(x).sum().backward()
    assert x.grad is not None
    return x.grad.tolist()


@pytest.mark.parametrize("spike", ALL, ids=IDS)
def test_fires_at_zero_and_above(spike: Surrogate) -> None:
    tiny = torch.finfo(torch.float32).smallest_normal
    u = torch.tensor([-1.0, -tiny, -0.0, 0.0, tiny, 1.0, math.inf, -math.inf, math.nan])
    assert spike(u).tolist() == [0, 0, 1, 1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("spike", ALL, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_keeps_dtype(spike: Surrogate, dtype: torch.dtype) -> None:
    u = torch.tensor([-0.25, 0.25], dtype=dtype, requires_grad=True)
    s = spike(u)
    s.sum().backward()
    assert s.dtype == dtype
    assert u.grad is not None
    assert u.grad.dtype == dtype


@pytest.mark.parametrize(
    ("spike", "u", "expected"),
    [
        (Sigmoid(4.0), 0.0, 1.0),
        (Sigmoid(2.0), math.log(3) / 2, 2 * 0.75 * 0.25),
        (Sigmoid(2.0), -math.log(3) / 2, 2 * 0.75 * 0.25),
        (Arctan(2.0), 0.0, 1.0),
        (Arctan(2.0), 1 / math.pi, 0.5),
        (Arctan(4.0), -1 / math.pi, 2 / 5),
        (FastSigmoid(10.0), 0.0, 1.0),
        (FastSigmoid(10.0), 0.1, 0.25),
        (FastSigmoid(2.0), -1.5, 1 / 16),
        (Rectangle(-0.25, 0.5, 2.0), 0.0, 2.0),
        (Rectangle(-0.25, 0.5, 2.0), -0.25, 0.0),
        (Rectangle(-0.25, 0.5, 2.0), 0.5, 0.0),
        (Rectangle(-0.25, 0.5, 2.0), 0.49, 2.0),
        (Triangle(2.0, 0.3), 0.0, 0.3),
        (Triangle(2.0, 0.3), -1.0, 0.15),
        (Triangle(2.0, 0.3), 2.5, 0.0),
    ],
)
def test_derivative_by_hand(spike: Surrogate, u: float, expected: float) -> None:
    assert derivative(spike, u) == [pytest.approx(expected, rel=1e-12)]


@pytest.mark.parametrize(
    ("spike", "area"),
    [
        (Sigmoid(4.0), 1.0),
        (Sigmoid(0.5), 1.0),
        (Arctan(2.0), 1.0),
        (Arctan(5.0), 1.0),
        (FastSigmoid(10.0), 2 / 10),
        (Rectangle(-0.5, 1.0, 2.0), 3.0),
        (Triangle(0.5, 3.0), 1.5),
    ],
)
def test_area(spike: Surrogate, area: float) -> None:
    # u = tan z turns the whole line into (-pi/2, pi/2); the midpoint rule leaves out the ends.
    n = 200_000
    z = (torch.arange(n, dtype=torch.float64) + 0.5) / n * math.pi - math.pi / 2
    integral = (spike.derivative(z.tan()) / z.cos() ** 2).sum() * math.pi / n
    assert integral.item() == pytest.approx(area, rel=1e-4)


@pytest.mark.parametrize("spike", ALL, ids=IDS)
def test_gradient_is_scaled_by_what_comes_in(spike: Surrogate) -> None:
    x = torch.tensor([0.125], requires_grad=True)
    spike(x).backward(torch.tensor([-3.0]))
    assert x.grad is not None
    assert torch.equal(x.grad, -3 * spike.derivative(x.detach()))


@pytest.mark.parametrize("width", [0.0, -1.0, math.nan, math.inf, "4", None])
@pytest.mark.parametrize("kind", [Sigmoid, Arctan, FastSigmoid, Triangle])
def test_bad_width(kind: type[Surrogate], width: object) -> None:
    with pytest.raises(ValueError, match=r"width is .*: expected a positive finite number"):
        kind(width)  # type: ignore[call-arg]


def test_bad_bounds_and_heights() -> None:
    for left, right in ((0.5, 0.5), (1.0, 0.0), (-math.inf, 0.0), (0.0, math.nan)):
        with pytest.raises(ValueError, match="expected finite, left < right"):
            Rectangle(left, right)
    for kind in (Rectangle, Triangle):
        with pytest.raises(ValueError, match=r"height is 0: expected a positive"):
            kind(height=0)


def test_ones_own() -> None:
    class Gaussian(Surrogate):
        def derivative(self, u: Tensor) -> Tensor:
            return torch.exp(-u * u)

    assert derivative(Gaussian(), 0.0, 2.0) == [1.0, pytest.approx(math.exp(-4))]


def test_without_a_derivative() -> None:
    class Forgotten(Surrogate):
        pass

    u = torch.zeros(1, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"Forgotten does not define derivative"):
        Forgotten()(u).backward()


def test_all_are_public() -> None:
    assert {type(s).__name__ for s in ALL} | {"Surrogate"} == set(surrogate.__all__)
