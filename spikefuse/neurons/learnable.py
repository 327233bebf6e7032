"""Parameters computed from unconstrained learnable tensors, so that they stay in range."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Learnable(nn.Module):
    """A parameter that PyTorch computes from learnable tensors, once per call.

    Assign it where a float is expected: `LIF(decay=LearnableFraction(0.9))`. The kernel receives
    the value and returns its gradient; autograd does the rest. `forward()` returns a 0-d tensor,
    or a 1-d tensor with one value per channel.
    """

    def forward(self) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not define forward(self)")

    def extra_repr(self) -> str:
        """Return the value, or the shape of several."""
        with torch.no_grad():
            return as_text(self())


class LearnableFraction(Learnable):
    """A learnable value in (0, 1): `sigmoid(logit)`. Suits decays.

    Args:
        initial: value before training, strictly between 0 and 1.
        channels: number of channels, each with its own value; None for a single value.

    Raises:
        ValueError: `initial` is out of range.
    """

    def __init__(self, initial: float, channels: int | None = None) -> None:
        super().__init__()
        if not 0.0 < initial < 1.0:
            raise ValueError(f"initial is {initial!r}: expected a number strictly between 0 and 1")
        self.logit = _parameter(math.log(initial / (1 - initial)), channels)

    def forward(self) -> Tensor:
        return torch.sigmoid(self.logit)


class LearnablePositive(Learnable):
    """A learnable value greater than 0: `exp(log_value)`. Suits thresholds and surrogate widths.

    Args:
        initial: value before training, positive.
        channels: number of channels, each with its own value; None for a single value.

    Raises:
        ValueError: `initial` is not a positive finite number.
    """

    def __init__(self, initial: float, channels: int | None = None) -> None:
        super().__init__()
        self.log_value = _parameter(_log("initial", initial), channels)

    def forward(self) -> Tensor:
        return torch.exp(self.log_value)


class LearnableTimeConstant(Learnable):
    """A decay in (0, 1) learned through its time constant: `exp(-1 / tau)`, `tau = exp(log_tau)`.

    This decay solves `tau dv/dt = -v` exactly over one time step, as
    `decay_from_tau(tau, exact=True)` does.

    Args:
        tau: time constant before training, in time steps, positive.
        channels: number of channels, each with its own value; None for a single value.

    Raises:
        ValueError: `tau` is not a positive finite number.
    """

    def __init__(self, tau: float, channels: int | None = None) -> None:
        super().__init__()
        self.log_tau = _parameter(_log("tau", tau), channels)

    def forward(self) -> Tensor:
        return torch.exp(-torch.exp(-self.log_tau))


def as_text(value: Tensor) -> str:
    """Return the value of a scalar, or the shape of any other tensor."""
    known = type(value) in (Tensor, nn.Parameter) and not value.is_meta
    return f"{value.item():g}" if known and value.ndim == 0 else f"shape={list(value.shape)}"


def _log(name: str, value: float) -> float:
    if not 0.0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}: expected a positive finite number")
    return math.log(value)


def _parameter(value: float, channels: int | None) -> nn.Parameter:
    return nn.Parameter(torch.full(() if channels is None else (channels,), value))
