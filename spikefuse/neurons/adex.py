"""Adaptive exponential integrate-and-fire."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from spikefuse.neurons.definition import State, States
from spikefuse.neurons.eif import EIF
from spikefuse.neurons.parameters import Value, number, positive
from spikefuse.neurons.surrogate import Surrogate


class AdEx(EIF):
    """Adaptive exponential neuron: `EIF` with a current `w` that follows the potential and spikes.

    Equation, per time step (forward Euler), potential `v`, adaptation `w`, input `x`, spike `s`::

        h = v + (x - w + v_rest - v + sharpness * exp((v - v_rheobase) / sharpness)) / tau
        s = 1 if h >= threshold else 0, then the reset of `LIF`
        w = w + (coupling * (v - v_rest) - w) / tau_adaptation + jump * s

    `x`, `w`, `coupling` and `jump` are I, w, a and b of the paper divided by its leak conductance.

    Shapes and accuracy: those of `EIF`; `w`: `[B, ...]` (float32).

    Source: Brette and Gerstner, "Adaptive Exponential Integrate-and-Fire Model as an Effective
    Description of Neuronal Activity", Journal of Neurophysiology 94, 2005.

    Example::

        neuron = sf.AdEx(tau_adaptation=100.0, jump=0.2)
        spikes, w = neuron(torch.rand(100, 32, 128), outputs=("spikes", "w"))  # w rises at spikes

    Args:
        tau, v_rest, v_rheobase, sharpness: see `EIF`.
        tau_adaptation: time constant of `w` in time steps, positive.
        coupling, jump: strength of the coupling of `w` to the potential; its increase at a spike.
        threshold, v_reset, detach_reset, surrogate: see `Firing`; the reset is hard.

    Raises:
        TypeError, ValueError: a parameter has the wrong type or is out of range.
    """

    w = State()

    def __init__(
        self,
        tau: Value = 2.0,
        v_rest: Value = 0.0,
        v_rheobase: Value = 0.8,
        sharpness: Value = 1.0,
        tau_adaptation: Value = 20.0,
        coupling: Value = 0.1,
        jump: Value = 0.2,
        threshold: Value = 1.0,
        *,
        v_reset: Value = 0.0,
        detach_reset: bool = False,
        surrogate: Surrogate | None = None,
    ) -> None:
        firing: Any = {"v_reset": v_reset, "detach_reset": detach_reset, "surrogate": surrogate}
        super().__init__(tau, v_rest, v_rheobase, sharpness, threshold, **firing)
        self.tau_adaptation = self._option("tau_adaptation", tau_adaptation, positive)
        self.coupling = self._option("coupling", coupling, number)
        self.jump = self._option("jump", jump, number)

    def step(self, x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, States]:  # type: ignore[override]
        follow = (self.coupling * (v - self.v_rest) - w) * (1 / self.tau_adaptation)
        s, v = self.fire(self.charge(x - w, v), self.threshold)
        return s, (v, w + follow + self.jump * s)
