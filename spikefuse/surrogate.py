"""Surrogate gradients: a Heaviside step forward, a smooth derivative backward.

Every surrogate maps `u = h - threshold` to a spike, 1 where `u >= 0` and else 0, and replaces
the derivative of that step by `derivative(u)`. Its width is a run-time value: a new width
compiles nothing.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Arctan", "FastSigmoid", "Rectangle", "Sigmoid", "Surrogate", "Triangle"]


class _Spike(torch.autograd.Function):
    @staticmethod
    def forward(u: Tensor, surrogate: Surrogate) -> Tensor:
        return (u >= 0).to(u.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Surrogate], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.surrogate = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (u,) = ctx.saved_tensors
        return grad * ctx.surrogate.derivative(u), None


class Surrogate(nn.Module):
    """Base class: `spike = surrogate(u)`. A subclass defines `derivative`, pointwise."""

    def derivative(self, u: Tensor) -> Tensor:
        """The pseudo-derivative of the spike with respect to `u`, of the same shape."""
        raise NotImplementedError(f"{type(self).__name__} does not define derivative(self, u)")

    def forward(self, u: Tensor) -> Tensor:
        return _Spike.apply(u, self)


def _positive(name: str, value: float) -> float:
    if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value!r}: expected a positive finite number")
    return float(value)


class Sigmoid(Surrogate):
    """`a s(au) (1 - s(au))` with the logistic function `s` and `a = width`.

    Source: Li et al., "Towards Scalable GPU-Accelerated SNN Training via Temporal Fusion",
    Eq. 6 (width 4), after Wu et al., Frontiers in Neuroscience 12, 2018.
    """

    def __init__(self, width: float = 4.0) -> None:
        super().__init__()
        self.width = _positive("width", width)

    def derivative(self, u: Tensor) -> Tensor:
        s = torch.sigmoid(self.width * u)
        return self.width * s * (1 - s)


class Arctan(Surrogate):
    """`(a / 2) / (1 + (pi a u / 2)^2)` with `a = width`.

    Source: Fang et al., "Incorporating Learnable Membrane Time Constant to Enhance Learning of
    Spiking Neural Networks", ICCV 2021.
    """

    def __init__(self, width: float = 2.0) -> None:
        super().__init__()
        self.width = _positive("width", width)

    def derivative(self, u: Tensor) -> Tensor:
        scaled = (math.pi / 2) * self.width * u
        return 0.5 * self.width / (1 + scaled * scaled)


class FastSigmoid(Surrogate):
    """`1 / (1 + a|u|)^2` with `a = width`.

    Source: Zenke and Ganguli, "SuperSpike: Supervised Learning in Multilayer Spiking Neural
    Networks", Neural Computation 30, 2018.
    """

    def __init__(self, width: float = 10.0) -> None:
        super().__init__()
        self.width = _positive("width", width)

    def derivative(self, u: Tensor) -> Tensor:
        base = 1 + self.width * torch.abs(u)
        return 1 / (base * base)


class Rectangle(Surrogate):
    """`height` where `left < u < right`, else 0.

    Source: Liang et al., "Accelerating Spatiotemporal Supervised Training of Large-Scale Spiking
    Neural Networks on GPU", Eq. 7 (`left` and `right` are its bounds minus the threshold).
    """

    def __init__(self, left: float = -0.5, right: float = 0.5, height: float = 1.0) -> None:
        super().__init__()
        if not (math.isfinite(left) and math.isfinite(right) and left < right):
            raise ValueError(f"left, right are {left!r}, {right!r}: expected finite, left < right")
        self.left, self.right = float(left), float(right)
        self.height = _positive("height", height)

    def derivative(self, u: Tensor) -> Tensor:
        return self.height * ((u > self.left) & (u < self.right)).to(u.dtype)


class Triangle(Surrogate):
    """`height * max(0, 1 - |u| / width)`.

    Source: Bellec et al., "Long short-term memory and learning-to-learn in networks of spiking
    neurons", NeurIPS 2018 (height 0.3 there, width the threshold).
    """

    def __init__(self, width: float = 1.0, height: float = 1.0) -> None:
        super().__init__()
        self.width, self.height = _positive("width", width), _positive("height", height)

    def derivative(self, u: Tensor) -> Tensor:
        return self.height * torch.clamp(1 - torch.abs(u) / self.width, min=0.0)
