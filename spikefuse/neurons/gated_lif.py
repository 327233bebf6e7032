"""Gated leaky integrate-and-fire."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from spikefuse.neurons.definition import State, States
from spikefuse.neurons.firing import Firing
from spikefuse.neurons.learnable import LearnableFraction
from spikefuse.neurons.parameters import Value, fraction, number
from spikefuse.neurons.surrogate import Surrogate


class GatedLIF(Firing):
    """Gated LIF neuron (GLIF): learned gates mix two kinds of leak, of input and of reset.

    Equation, per time step, with the decayed potential `v`, input `x`, spike `s`::

        h = v - (1 - alpha) * leak + (1 - beta * (1 - conductance)) * x
        s = 1 if h >= threshold else 0
        v = (1 - alpha * (1 - decay)) * h * (1 - gamma * s) - (1 - gamma) * drop * s

    From 0 to 1, `alpha` moves from a constant to an exponential leak, `beta` from the plain to the
    scaled input, and `gamma` from subtracting `drop` to a reset to 0. Every parameter is a learned
    fraction, `sigmoid(logit)`. The paper has one conductance per time step; here it is a single
    value, because a neuron does not depend on the number of time steps.

    Shapes: `x`, spikes: `[T, B, ...]` (float32, bfloat16 or float16); `v`: `[B, ...]` (float32).

    Source: Yao et al., "GLIF: A Unified Gated Leaky Integrate-and-Fire Neuron for Spiking Neural
    Networks", NeurIPS 2022.

    Example::

        neuron = sf.GatedLIF(channels=128)  # eight learned values per channel
        spikes = neuron(torch.rand(8, 32, 128))

    Args:
        decay, threshold, leak, drop, conductance: values before training, strictly between 0
            and 1; or tensors or `Learnable`, which are used unchanged. A number that is
            assigned in place of a tensor is in [0, 1].
        alpha, beta, gamma: gates, given in the same way.
        channels: number of channels (dim 2 of `[T, B, C, ...]`), each with its own values; None
            for single values.
        detach_reset, surrogate: see `Firing`.

    Raises:
        TypeError, ValueError: a parameter has the wrong type or is out of range.
    """

    v = State()

    def __init__(
        self,
        decay: Value = 0.25,
        threshold: Value = 0.5,
        leak: Value = 0.0625,
        drop: Value = 0.5,
        conductance: Value = 0.5,
        alpha: Value = 0.5,
        beta: Value = 0.5,
        gamma: Value = 0.5,
        channels: int | None = None,
        *,
        detach_reset: bool = False,
        surrogate: Surrogate | None = None,
    ) -> None:
        super().__init__(
            self._fraction("threshold", threshold, channels),
            detach_reset=detach_reset,
            surrogate=surrogate,
        )
        self.decay = self._fraction("decay", decay, channels)
        self.leak = self._fraction("leak", leak, channels)
        self.drop = self._fraction("drop", drop, channels)
        self.conductance = self._fraction("conductance", conductance, channels)
        self.alpha = self._fraction("alpha", alpha, channels)
        self.beta = self._fraction("beta", beta, channels)
        self.gamma = self._fraction("gamma", gamma, channels)

    def _fraction(self, name: str, value: Any, channels: int | None) -> Any:
        value = self._option(name, number(name, value), _fixed)
        if not isinstance(value, float):
            return value
        if not 0 < value < 1:
            raise ValueError(f"{name} is {value!r}: expected a number strictly between 0 and 1")
        return LearnableFraction(value, channels)

    def step(self, x: Tensor, v: Tensor) -> tuple[Tensor, States]:
        gain = 1 - self.beta * (1 - self.conductance)
        h = v - (1 - self.alpha) * self.leak + gain * x
        self.expose(h=h)
        s = self.surrogate(h - self.threshold)
        r = s.detach() if self.detach_reset else s
        remaining = (1 - self.alpha * (1 - self.decay)) * h * (1 - self.gamma * r)
        return s, (remaining - (1 - self.gamma) * self.drop * r,)


def _fixed(name: str, value: Any) -> Any:
    """Check what is assigned: a number in [0, 1], a tensor or a `Learnable`."""
    value = number(name, value)
    return fraction(name, value) if isinstance(value, float) else value
