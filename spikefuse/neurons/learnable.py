"""Parameters computed from unconstrained learnable tensors, so that they stay in range."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from spikefuse.neurons.checks import integer

#: A value before training, or several: of channels, or of neurons as in `Neuron`.
Initial = float | Sequence[float] | Tensor


class Learnable(nn.Module):
    """A parameter that PyTorch computes from learnable tensors, once per call.

    Assign it where a float is expected: `LIF(decay=LearnableFraction(0.9))`. The kernel receives
    the value and returns its gradient; autograd does the rest. `forward()` returns a 0-d tensor,
    or a 1-d tensor with one value per channel.

    Example::

        class Clamped(sf.Learnable):
            def __init__(self):
                super().__init__()
                self.value = nn.Parameter(torch.tensor(0.9))

            def forward(self):
                return self.value.clamp(0, 1)

        spikes = sf.LIF(decay=Clamped())(torch.rand(8, 32, 128))
    """

    def forward(self) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not define forward(self)")

    def extra_repr(self) -> str:
        """Return the value, or the shape of several."""
        with torch.no_grad():
            return as_text(self())


class LearnableFraction(Learnable):
    """A learnable value in (0, 1): `sigmoid(logit)`. Suits decays.

    Example::

        neuron = sf.LIF(decay=sf.LearnableFraction(0.9, channels=128))
        spikes = neuron(torch.rand(8, 32, 128))

    Args:
        initial: value before training, strictly between 0 and 1, or several, one per channel.
        channels: number of channels that begin with the same value; None for `initial` alone.

    Raises:
        ValueError: `initial` is out of range.
    """

    def __init__(self, initial: Initial, channels: int | None = None) -> None:
        super().__init__()
        value = _values("initial", initial, channels, 1.0)
        self.logit = nn.Parameter(torch.logit(value).float())

    def forward(self) -> Tensor:
        return torch.sigmoid(self.logit)


class LearnablePositive(Learnable):
    """A learnable value greater than 0: `exp(log_value)`. Suits thresholds and surrogate widths.

    Example::

        neuron = sf.LIF(threshold=sf.LearnablePositive(1.0))
        spikes = neuron(torch.rand(8, 32, 128))

    Args:
        initial: value before training, positive, or several, one per channel.
        channels: number of channels that begin with the same value; None for `initial` alone.

    Raises:
        ValueError: `initial` is not a positive finite number.
    """

    def __init__(self, initial: Initial, channels: int | None = None) -> None:
        super().__init__()
        value = _values("initial", initial, channels)
        self.log_value = nn.Parameter(torch.log(value).float())

    def forward(self) -> Tensor:
        return torch.exp(self.log_value)


class LearnableTimeConstant(Learnable):
    """A decay in (0, 1) learned through its time constant: `exp(-1 / tau)`, `tau = exp(log_tau)`.

    This decay solves `tau dv/dt = -v` exactly over one time step, as
    `decay_from_tau(tau, exact=True)` does.

    Example::

        neuron = sf.LIF(decay=sf.LearnableTimeConstant(20.0, channels=128))  # 20 time steps
        spikes = neuron(torch.rand(100, 32, 128))

    Args:
        tau: time constant before training, in time steps, positive, or several, one per channel.
        channels: number of channels that begin with the same value; None for `initial` alone.

    Raises:
        ValueError: `tau` is not a positive finite number.
    """

    def __init__(self, tau: Initial, channels: int | None = None) -> None:
        super().__init__()
        self.log_tau = nn.Parameter(torch.log(_values("tau", tau, channels)).float())

    def forward(self) -> Tensor:
        return torch.exp(-torch.exp(-self.log_tau))


def as_text(value: Tensor) -> str:
    """Return the value of a scalar, or the shape of any other tensor."""
    known = type(value) in (Tensor, nn.Parameter) and not value.is_meta
    return f"{value.item():g}" if known and value.ndim == 0 else f"shape={list(value.shape)}"


def _values(name: str, initial: Initial, channels: int | None, high: float = math.inf) -> Tensor:
    """Return values before training in double precision, all between 0 and `high`.

    Raises:
        TypeError, ValueError: they are not, or they are not one for each channel.
    """
    try:
        values = torch.as_tensor(initial).detach().double()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} is {initial!r}: expected a number, or several") from None
    if not (values.is_meta or ((values > 0) & (values < high)).all()):
        expected = (
            "a positive finite number"
            if high == math.inf
            else ("a number strictly between 0 and 1")
        )
        raise ValueError(f"{name} is {initial!r}: expected {expected}")
    if channels is None:
        return values
    channels = integer("channels", channels)
    if values.ndim and values.shape != (channels,):
        raise ValueError(f"{name} has shape {list(values.shape)}: expected [{channels}]")
    return values.expand(channels)
