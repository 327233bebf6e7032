"""Surrogate gradients: a step function forward, a smooth derivative backward.

A surrogate maps `u = h - threshold` to a spike, 1 where `u >= 0` and 0 elsewhere, and replaces the
derivative of that step by `derivative(u)`. Its parameters are run-time values like a neuron's:
floats, tensors with one value or one per channel, or `Learnable`. A new value does not recompile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from spikefuse._torch import is_traced
from spikefuse.neurons.learnable import Learnable
from spikefuse.neurons.parameters import NUMBERS, Holder, Value, evaluated, number, positive
from spikefuse.neurons.spike import Spike, TransformedSpike, has_tangent

__all__ = [
    "Arctan",
    "Custom",
    "Erf",
    "FastSigmoid",
    "Gaussian",
    "MultiGaussian",
    "PiecewiseQuadratic",
    "Rectangle",
    "Sigmoid",
    "StraightThrough",
    "Surrogate",
    "Triangle",
]

Cutoff = Value | None


class Surrogate(Holder):
    """Base of surrogates: `spike = surrogate(u)`. Subclasses define `derivative`, pointwise.

    A parameter that requires a gradient receives that of `primal`, the smooth function whose
    derivative the surrogate is: `dL/dwidth = sum g * d primal(u) / d width`, with `g` the gradient
    of the spikes. This follows Wang et al., "Adaptive Smoothing Gradient Learning for Spiking
    Neural Networks", ICML 2023, but their smoothing of the forward pass is omitted.

    Shapes: `u`, the spike and the derivative have the same shape and floating-point dtype.
    Units: `u` is in the unit of the potential, widths are in that unit or its inverse. Parameters
    of the surrogates below are positive, except for the bounds of `Rectangle`, and each of those
    surrogates takes a `cutoff`.

    Args:
        cutoff: where `u < cutoff`, `u` and the parameters receive no gradient; None disables it. It
            cannot be learned. Source: Finkbeiner and Neftci, "Drastically Improved SNN-Training
            Throughput on the IPU by Utilizing Activation Sparsity" (secondary threshold).

    Raises:
        TypeError, ValueError: a parameter has the wrong type, is out of range or cannot be learned.
    """

    def __init__(self, cutoff: Cutoff = None) -> None:
        super().__init__()
        self.cutoff = None if cutoff is None else number("cutoff", cutoff)

    def spike(self, u: Tensor) -> Tensor:
        """Return the output of the forward pass; a bool is converted to 0 or 1."""
        return u >= 0

    def derivative(self, u: Tensor) -> Tensor:
        """Return the surrogate derivative of the spike with respect to `u`, of the same shape."""
        raise NotImplementedError(f"{type(self).__name__} does not define derivative(self, u)")

    def primal(self, u: Tensor) -> Tensor:
        """Return the integral of `derivative` from 0 to `u`, up to a constant."""
        raise NotImplementedError(f"{type(self).__name__} does not define primal(self, u)")

    def tangent(self, u: Tensor) -> Tensor:
        """Return any expression whose gradients with respect to the parameters equal `primal`'s.

        Override it where `primal` needs an operation that kernels do not support (erf, atan).
        """
        return self.primal(u)

    def learns(self, name: str) -> bool:
        """Return whether the parameter `name` may require a gradient."""
        return name != "cutoff" and type(self).primal is not Surrogate.primal

    def forward(self, u: Tensor) -> Tensor:
        if any(isinstance(module, Learnable) for module in self.modules()):
            # Called without a neuron, which would have evaluated it.
            return evaluated(self).forward(u)
        learned = list(self._learned()) if torch.is_grad_enabled() else []
        for name in learned:
            if not self.learns(name):
                raise no_gradient(name)
        if torch.jit.is_tracing() and not (learned or u.requires_grad):  # type: ignore[attr-defined]
            return self.spike(u).to(u.dtype)  # programs of torch.jit can't call a Function
        function = Spike if is_traced() else TransformedSpike
        return function.apply(u, self, self.tangent(u.detach()) if learned else None)

    def _learned(self) -> Iterator[str]:
        for prefix, module in self.named_modules():
            plain = () if is_traced() else vars(module).items()  # which PyTorch 2.11 cannot trace
            tensors = *module.named_parameters(recurse=False), *module.named_buffers(recurse=False)
            for name, value in (*plain, *tensors):
                if isinstance(value, Tensor) and (value.requires_grad or has_tangent(value)):
                    yield f"{prefix}.{name}".lstrip(".")


def no_gradient(name: str) -> ValueError:
    """Return the error for a parameter that requires a gradient but cannot have one."""
    return ValueError(
        f"'{name}' requires a gradient, but its surrogate has none: the parameters of a "
        "surrogate are learned through primal(self, u), which the surrogate must define; a cutoff, "
        "and the factors of Gaussian and MultiGaussian, cannot be learned"
    )


class Sigmoid(Surrogate):
    """Derivative of a logistic function `s`: `a s(au) (1 - s(au))` with steepness `a = width`.

    Source: Li et al., "Towards Scalable GPU-Accelerated SNN Training via Temporal Fusion",
    Eq. 6 (width 4), after Wu et al., Frontiers in Neuroscience 12, 2018.

    Args:
        width: steepness, in the inverse unit of `u`.
        cutoff: see `Surrogate`.
    """

    def __init__(self, width: Value = 4.0, *, cutoff: Cutoff = None) -> None:
        super().__init__(cutoff)
        self.width = self._option("width", width, positive)

    def derivative(self, u: Tensor) -> Tensor:
        s = torch.sigmoid(self.width * u)
        return self.width * s * (1 - s)

    def primal(self, u: Tensor) -> Tensor:
        return torch.sigmoid(self.width * u)


class Arctan(Surrogate):
    """Derivative of an arctangent: `(a / 2) / (1 + (pi a u / 2)^2)` with steepness `a = width`.

    Source: Fang et al., "Incorporating Learnable Membrane Time Constant to Enhance Learning of
    Spiking Neural Networks", ICCV 2021.

    Args:
        width: steepness, in the inverse unit of `u`.
        cutoff: see `Surrogate`.
    """

    def __init__(self, width: Value = 2.0, *, cutoff: Cutoff = None) -> None:
        super().__init__(cutoff)
        self.width = self._option("width", width, positive)

    def derivative(self, u: Tensor) -> Tensor:
        scaled = (math.pi / 2) * self.width * u
        return 0.5 * self.width / (1 + scaled * scaled)

    def primal(self, u: Tensor) -> Tensor:
        return torch.atan((math.pi / 2) * self.width * u) / math.pi

    def tangent(self, u: Tensor) -> Tensor:
        scaled = (math.pi / 2) * self.width * u
        return scaled / (math.pi * (1 + (scaled * scaled).detach()))


class FastSigmoid(Surrogate):
    """Derivative of a fast sigmoid: `height / (1 + a|u|)^2` with steepness `a = width`.

    Source: Zenke and Ganguli, "SuperSpike: Supervised Learning in Multilayer Spiking Neural
    Networks", Neural Computation 30, 2018.

    Args:
        width: steepness, in the inverse unit of `u`.
        height: derivative at the threshold.
        cutoff: see `Surrogate`.
    """

    def __init__(self, width: Value = 10.0, height: Value = 1.0, *, cutoff: Cutoff = None) -> None:
        super().__init__(cutoff)
        self.width = self._option("width", width, positive)
        self.height = self._option("height", height, positive)

    def derivative(self, u: Tensor) -> Tensor:
        base = 1 + self.width * torch.abs(u)
        return self.height / (base * base)

    def primal(self, u: Tensor) -> Tensor:
        return self.height * u / (1 + self.width * torch.abs(u))


class PiecewiseQuadratic(Surrogate):
    """Triangle of area 1 and steepness `a = width`: `a max(0, 1 - a|u|)`, or `Triangle(1 / a, a)`.

    Source: Esser et al., "Convolutional networks for fast, energy-efficient neuromorphic
    computing", PNAS 113, 2016 (a = 1).

    Args:
        width: steepness, in the inverse unit of `u`.
        cutoff: see `Surrogate`.
    """

    def __init__(self, width: Value = 1.0, *, cutoff: Cutoff = None) -> None:
        super().__init__(cutoff)
        self.width = self._option("width", width, positive)

    def derivative(self, u: Tensor) -> Tensor:
        return self.width * torch.clamp(1 - self.width * torch.abs(u), min=0.0)

    def primal(self, u: Tensor) -> Tensor:
        return _hat(self.width * u)


class Triangle(Surrogate):
    """Triangle: `height * max(0, 1 - |u| / width)`; `width` is half its base.

    Source: Bellec et al., "Long short-term memory and learning-to-learn in networks of spiking
    neurons", NeurIPS 2018 (height 0.3 there, width the threshold).

    Args:
        width: half the base, in the unit of `u`.
        height: derivative at the threshold.
        cutoff: see `Surrogate`.
    """

    def __init__(self, width: Value = 1.0, height: Value = 1.0, *, cutoff: Cutoff = None) -> None:
        super().__init__(cutoff)
        self.width = self._option("width", width, positive)
        self.height = self._option("height", height, positive)

    def derivative(self, u: Tensor) -> Tensor:
        return self.height * torch.clamp(1 - torch.abs(u) / self.width, min=0.0)

    def primal(self, u: Tensor) -> Tensor:
        return self.height * self.width * _hat(u / self.width)


def _hat(z: Tensor) -> Tensor:
    """Return the integral of `max(0, 1 - |z|)` from 0."""
    z = torch.clamp(z, -1.0, 1.0)
    return z - 0.5 * z * torch.abs(z)


class Rectangle(Surrogate):
    """Rectangle: `height` where `left < u < right`, 0 elsewhere; `left < right`.

    Source: Liang et al., "Accelerating Spatiotemporal Supervised Training of Large-Scale Spiking
    Neural Networks on GPU", Eq. 7 (`left` and `right` are its bounds minus the threshold).

    Args:
        left: lower bound, in the unit of `u`.
        right: upper bound, in the unit of `u`.
        height: derivative between them.
        cutoff: see `Surrogate`.
    """

    def __init__(
        self, left: Value = -0.5, right: Value = 0.5, height: Value = 1.0, *, cutoff: Cutoff = None
    ) -> None:
        super().__init__(cutoff)
        numbers = [bound for bound in (left, right) if isinstance(bound, NUMBERS)]
        if not all(map(math.isfinite, numbers)) or (len(numbers) == 2 and numbers[0] >= numbers[1]):
            raise ValueError(f"left, right are {left!r}, {right!r}: expected finite, left < right")
        self.left = self._option("left", left, number)
        self.right = self._option("right", right, number)
        self.height = self._option("height", height, positive)

    def derivative(self, u: Tensor) -> Tensor:
        return self.height * ((u > self.left) & (u < self.right)).to(u.dtype)

    def primal(self, u: Tensor) -> Tensor:
        def clamp(x: Tensor) -> Tensor:
            return torch.clamp(torch.clamp(x, min=self.left), max=self.right)

        return self.height * (clamp(u) - clamp(torch.zeros_like(u)))


class Erf(Surrogate):
    """Derivative of `erf(au) / 2`: `a / sqrt(pi) exp(-(au)^2)` with steepness `a = width`.

    It equals `Gaussian(1 / (sqrt(2) a))`.

    Source: Esser et al., "Backpropagation for Energy-Efficient Neuromorphic Computing", NeurIPS
    2015.

    Args:
        width: steepness, in the inverse unit of `u`.
        cutoff: see `Surrogate`.
    """

    def __init__(self, width: Value = 2.0, *, cutoff: Cutoff = None) -> None:
        super().__init__(cutoff)
        self.width = self._option("width", width, positive)

    def derivative(self, u: Tensor) -> Tensor:
        z = self.width * u
        return self.width / math.sqrt(math.pi) * torch.exp(-(z * z))

    def primal(self, u: Tensor) -> Tensor:
        return 0.5 * torch.erf(self.width * u)

    def tangent(self, u: Tensor) -> Tensor:
        z = self.width * u
        return torch.exp(-(z * z).detach()) / math.sqrt(math.pi) * z


class Gaussian(Surrogate):
    """Normal density: `scale * N(u)`, with mean 0 and standard deviation `width`.

    Source: Yin et al., "Accurate and efficient time-domain classification with adaptive spiking
    recurrent neural networks", Nature Machine Intelligence 3, 2021 (width 0.5, scale 0.5).

    Args:
        width: standard deviation, in the unit of `u`.
        scale: area, which cannot be learned.
        cutoff: see `Surrogate`.
    """

    def __init__(self, width: Value = 0.5, scale: Value = 1.0, *, cutoff: Cutoff = None) -> None:
        super().__init__(cutoff)
        self.width = self._option("width", width, positive)
        self.scale = self._option("scale", scale, positive)

    def derivative(self, u: Tensor) -> Tensor:
        return self.scale * _bell(u / self.width) / self.width

    def primal(self, u: Tensor) -> Tensor:
        return self.scale * _integrated_bell(u / self.width)

    def tangent(self, u: Tensor) -> Tensor:
        return self.scale * _along_bell(u / self.width)

    def learns(self, name: str) -> bool:
        return name == "width"


class MultiGaussian(Surrogate):
    """Mixture `scale * ((1 + p) N(u; 0, w) - p N(u; w, sw) - p N(u; -w, sw))`.

    `N(u; m, d)` is the normal density with mean m and standard deviation d.

    Source: Yin et al., "Accurate and efficient time-domain classification with adaptive spiking
    recurrent neural networks", Nature Machine Intelligence 3, 2021 (h = 0.15, s = 6, width 0.5;
    the authors' code has scale 0.5).

    Args:
        width: `w`, in the unit of `u`.
        share: `p`, which cannot be learned.
        spread: `s`, the ratio of the outer widths to `width`.
        scale: factor of the mixture, which cannot be learned.
        cutoff: see `Surrogate`.
    """

    def __init__(
        self,
        width: Value = 0.5,
        share: Value = 0.15,
        spread: Value = 6.0,
        scale: Value = 1.0,
        *,
        cutoff: Cutoff = None,
    ) -> None:
        super().__init__(cutoff)
        self.width = self._option("width", width, positive)
        self.share = self._option("share", share, positive)
        self.spread = self._option("spread", spread, positive)
        self.scale = self._option("scale", scale, positive)

    def _mixed(self, density: Callable[[Tensor], Tensor], u: Tensor, inner: Any) -> Tensor:
        """Return the mixture of `density`; `inner` divides the outer terms."""
        z = u / self.width
        outer = density((z - 1) / self.spread) + density((z + 1) / self.spread)
        return self.scale * ((1 + self.share) * density(z) - self.share * outer / inner)

    def derivative(self, u: Tensor) -> Tensor:
        return self._mixed(_bell, u, self.spread) / self.width

    def primal(self, u: Tensor) -> Tensor:
        return self._mixed(_integrated_bell, u, 1.0)

    def tangent(self, u: Tensor) -> Tensor:
        return self._mixed(_along_bell, u, 1.0)

    def learns(self, name: str) -> bool:
        return name in ("width", "spread")


def _bell(z: Tensor) -> Tensor:
    """Return the standard normal density."""
    return torch.exp(-0.5 * (z * z)) * (1 / math.sqrt(2 * math.pi))


def _integrated_bell(z: Tensor) -> Tensor:
    return 0.5 * torch.erf(z * math.sqrt(0.5))


def _along_bell(z: Tensor) -> Tensor:
    """Return an expression with the derivatives of `_integrated_bell`."""
    return _bell(z.detach()) * z


class StraightThrough(Surrogate):
    """Straight-through estimator: 1 everywhere.

    `StraightThrough(cutoff=0.0)` passes gradients only where there is a spike, and
    `Rectangle(-1.0, 1.0)` is the clipped form.

    The gradient through a hard reset has the factor `v_reset - h`, however large `h` is, at each
    step, so that gradients of large float16 inputs overflow: use `detach_reset=True`.

    Source: Bengio et al., "Estimating or Propagating Gradients Through Stochastic Neurons for
    Conditional Computation", arXiv:1308.3432, 2013.

    Args:
        cutoff: see `Surrogate`.
    """

    def __init__(self, *, cutoff: Cutoff = None) -> None:
        super().__init__(cutoff)

    def derivative(self, u: Tensor) -> Tensor:
        return torch.ones_like(u)

    def primal(self, u: Tensor) -> Tensor:
        return u


class Custom(Surrogate):
    """A surrogate made of pointwise functions of `u`, without writing a subclass.

    Parameters are given by name and passed to every function::

        Custom(lambda u, width: torch.exp(-width * torch.abs(u)), width=4.0)

    Each set of functions, compared by identity, compiles a kernel: define them once.

    Args:
        derivative: see `Surrogate.derivative`.
        spike: see `Surrogate.spike`; by default 1 where `u >= 0`, 0 elsewhere.
        primal: see `Surrogate.primal`; required to learn the parameters.
        cutoff: see `Surrogate`.
        values: parameters: floats, tensors (one value or one per channel) or `Learnable`.

    Raises:
        TypeError: a function is not callable, or a parameter has the wrong type.
        ValueError: the name of a parameter is taken, or its value is not finite.
    """

    def __init__(
        self,
        derivative: Callable[..., Tensor],
        spike: Callable[..., Tensor] | None = None,
        primal: Callable[..., Tensor] | None = None,
        *,
        cutoff: Cutoff = None,
        **values: Value,
    ) -> None:
        super().__init__(cutoff)
        functions = {"derivative": derivative, "spike": spike, "primal": primal}
        for name, function in functions.items():
            if not callable(function) and (function is not None or name == "derivative"):
                raise TypeError(f"{name} is {function!r}: expected a function of u")
        self._derivative, self._spike, self._primal = derivative, spike, primal
        for name, value in values.items():
            if hasattr(self, name):
                raise ValueError(f"a parameter cannot be named {name!r}: the name is taken")
            setattr(self, name, self._option(name, value, number))
        self._names = tuple(values)

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def spike(self, u: Tensor) -> Tensor:
        return super().spike(u) if self._spike is None else self._spike(u, **self._values())

    def derivative(self, u: Tensor) -> Tensor:
        return self._derivative(u, **self._values())

    def primal(self, u: Tensor) -> Tensor:
        return super().primal(u) if self._primal is None else self._primal(u, **self._values())

    def learns(self, name: str) -> bool:
        return name != "cutoff" and self._primal is not None


def checked(name: str, surrogate: Surrogate | None) -> Surrogate:
    """Check a surrogate; None becomes `Sigmoid(4.0)`.

    Raises:
        TypeError: it is something else, such as a class.
    """
    if not isinstance(surrogate, Surrogate | None):
        raise TypeError(
            f"{name} is {surrogate!r}: expected a surrogate like Sigmoid(4.0), or for a function "
            "of your own surrogate.Custom(derivative=...)"
        )
    return Sigmoid() if surrogate is None else surrogate
