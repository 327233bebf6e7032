"""Gated leaky integrate-and-fire."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from spikefuse.neurons.definition import State, States, number
from spikefuse.neurons.firing import Firing, Value
from spikefuse.neurons.learnable import LearnableFraction
from spikefuse.neurons.surrogate import Surrogate


class GatedLIF(Firing):
    """Gated LIF neuron (GLIF): learned gates mix two kinds of leak, of input and of reset.

    Equation, per time step, with the decayed potential `v`, input `x`, spike `s`::

        h = v - (1 - alpha) * leak + (1 - beta * (1 - conductance)) * x
        s = 1 if h >= threshold else 0
        v = (1 - alpha * (1 - decay)) * h * (1 - gamma * s) - (1 - gamma) * drop * s

    So `alpha` goes from a constant leak to an exponential one, `beta` from the plain input to a
    scaled one, and `gamma` from subtracting `drop` to a reset to 0. Every parameter is a learned
    fraction, `sigmoid(logit)`. The paper's conductance, one per time step, is one value here, as
    the number of time steps is not part of a neuron.

    Shapes: `x` and the spikes are `[T, B, ...]`; the state `v` is `[B, ...]` in float32.

    Source: Yao et al., "GLIF: A Unified Gated Leaky Integrate-and-Fire Neuron for Spiking Neural
    Networks", NeurIPS 2022.

    Args:
        decay, threshold, leak, drop, conductance: values before training, strictly between 0
            and 1; or tensors or `Learnable` to take as they are.
        alpha, beta, gamma: the gates, likewise.
        channels: number of channels (dim 2 of `[T, B, C, ...]`) for one value each.
        detach_reset, surrogate: see `Firing`.
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
            _fraction("threshold", threshold, channels),
            detach_reset=detach_reset,
            surrogate=surrogate,
        )
        self.decay = _fraction("decay", decay, channels)
        self.leak = _fraction("leak", leak, channels)
        self.drop = _fraction("drop", drop, channels)
        self.conductance = _fraction("conductance", conductance, channels)
        self.alpha = _fraction("alpha", alpha, channels)
        self.beta = _fraction("beta", beta, channels)
        self.gamma = _fraction("gamma", gamma, channels)

    def step(self, x: Tensor, v: Tensor) -> tuple[Tensor, States]:
        gain = 1 - self.beta * (1 - self.conductance)
        h = v - (1 - self.alpha) * self.leak + gain * x
        s = self.surrogate(h - self.threshold)
        r = s.detach() if self.detach_reset else s
        kept = (1 - self.alpha * (1 - self.decay)) * h * (1 - self.gamma * r)
        return s, (kept - (1 - self.gamma) * self.drop * r,)


def _fraction(name: str, value: Any, channels: int | None) -> Any:
    value = number(name, value)
    if not isinstance(value, float):
        return value
    if not 0 < value < 1:
        raise ValueError(f"{name} is {value!r}: expected a number strictly between 0 and 1")
    return LearnableFraction(value, channels)
