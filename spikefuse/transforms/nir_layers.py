"""What `to_nir` and `from_nir` share: layers that torch.nn lacks, and the package nir."""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor, nn

from spikefuse.neurons.definition import SpikingLayer
from spikefuse.neurons.parameters import NUMBERS
from spikefuse.neurons.surrogate import Surrogate
from spikefuse.nn.symbolic import leaf


class Scale(nn.Module):
    """Multiply each value of a step by a constant: `y = x * scale`, NIR's `Scale`.

    Shapes: `x`, `y`: `[B, ...]`; `scale`, a buffer: any shape that broadcasts to one of x's rows.
    """

    def __init__(self, scale: Tensor | float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.as_tensor(scale))
        self.scale: Tensor

    @leaf
    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale

    def extra_repr(self) -> str:
        return f"{self.scale.item():g}" if self.scale.ndim == 0 else f"{list(self.scale.shape)}"


class Threshold(SpikingLayer):
    """Fire where a value is above a threshold, without a state: NIR's `Threshold`.

    Shapes: `x`, the spikes: `[B, ...]`; `threshold`, a buffer: any shape that broadcasts to one of
    x's rows.
    """

    def __init__(self, threshold: Tensor | float, surrogate: Surrogate) -> None:
        super().__init__()
        self.register_buffer("threshold", torch.as_tensor(threshold))
        self.threshold: Tensor
        self.surrogate = surrogate

    @leaf
    def forward(self, x: Tensor) -> Tensor:
        return self.surrogate(x - self.threshold)


def package() -> ModuleType:
    """Return the package nir.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    try:
        import nir
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'NIR graphs need the package nir: pip install "spikefuse[nir]"', name=error.name
        ) from error
    return nir


def check_dt(dt: float) -> float:
    """Return the duration of a time step.

    Raises:
        TypeError, ValueError: it is not a positive finite number.
    """
    if isinstance(dt, bool) or not isinstance(dt, NUMBERS):
        raise TypeError(f"dt is {dt!r}: expected the duration of a time step, a number")
    if not 0 < dt < math.inf:
        raise ValueError(f"dt is {dt!r}: expected a positive finite number")
    return float(dt)
