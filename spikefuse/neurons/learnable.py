"""Parameters that are computed from learnable tensors, so that they keep to their range."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from spikefuse.neurons.parameters import Learnable as Learnable


class LearnableFraction(Learnable):
    """A learnable value in (0, 1): `sigmoid(logit)`. For decays.

    Args:
        initial: its value before training, strictly between 0 and 1.
        channels: number of channels for one value each, or None for a single value.

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
    """A learnable value greater than 0: `exp(log_value)`. For thresholds and surrogates' widths.

    Args:
        initial: its value before training, positive.
        channels: number of channels for one value each, or None for a single value.

    Raises:
        ValueError: `initial` is not a positive finite number.
    """

    def __init__(self, initial: float, channels: int | None = None) -> None:
        super().__init__()
        self.log_value = _parameter(_log("initial", initial), channels)

    def forward(self) -> Tensor:
        return torch.exp(self.log_value)


class LearnableTimeConstant(Learnable):
    """A decay in (0, 1) learned as its time constant: `exp(-1 / tau)` with `tau = exp(log_tau)`.

    That decay is the exact solution of `tau dv/dt = -v` over one time step, as in
    `decay_from_tau(tau, exact=True)`.

    Args:
        tau: time constant before training, in time steps, positive.
        channels: number of channels for one value each, or None for a single value.

    Raises:
        ValueError: `tau` is not a positive finite number.
    """

    def __init__(self, tau: float, channels: int | None = None) -> None:
        super().__init__()
        self.log_tau = _parameter(_log("tau", tau), channels)

    def forward(self) -> Tensor:
        return torch.exp(-torch.exp(-self.log_tau))


def _log(name: str, value: float) -> float:
    if not 0.0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}: expected a positive finite number")
    return math.log(value)


def _parameter(value: float, channels: int | None) -> nn.Parameter:
    return nn.Parameter(torch.full(() if channels is None else (channels,), value))
