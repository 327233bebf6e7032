"""Leaky integrate-and-fire."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from spikefuse.neurons.definition import State, States, number
from spikefuse.neurons.firing import Firing, Value


class LIF(Firing):
    """Leaky integrate-and-fire neuron.

    Equation, per time step, with potential `v`, input `x`, spike `s`::

        h = decay * v + x                       (charge)
        s = 1 if h >= threshold else 0          (fire)
        v = h * (1 - s) + v_reset * s           (hard reset)
        v = h - threshold * s                   (soft reset)

    Shapes: `x` and the spikes are `[T, B, ...]`; the state `v` is `[B, ...]` in float32.

    Source: Li et al., "Towards Scalable GPU-Accelerated SNN Training via Temporal Fusion",
    Eqs. 1 to 3 (`decay` is its k_tau, `threshold` its V_th; v_reset = 0).

    Args:
        decay: factor of the previous potential, in [0, 1].
        threshold, v_reset, reset, detach_reset, surrogate: see `Firing`.
    """

    v = State()

    def __init__(self, decay: Value = 0.5, threshold: Value = 1.0, **firing: Any) -> None:
        super().__init__(threshold, **firing)
        self.decay = number("decay", decay, 0.0, 1.0)

    def step(self, x: Tensor, v: Tensor) -> tuple[Tensor, States]:
        s, v = self.fire(self.charge(x, v), self.threshold)
        return s, (v,)

    def charge(self, x: Tensor, v: Tensor) -> Tensor:
        """Potential before the reset: `decay * v + x`."""
        return self.decay * v + x
