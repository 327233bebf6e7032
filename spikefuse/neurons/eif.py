"""Exponential integrate-and-fire."""

from __future__ import annotations

import torch
from torch import Tensor

from spikefuse.neurons.definition import State, States
from spikefuse.neurons.firing import Firing, Reset
from spikefuse.neurons.parameters import Value, number, positive
from spikefuse.neurons.surrogate import Surrogate


class EIF(Firing):
    """Exponential integrate-and-fire neuron: a leak, and exponential growth above `v_rheobase`.

    Equation, per time step (forward Euler), with potential `v`, input `x`, spike `s`::

        h = v + (x + v_rest - v + sharpness * exp((v - v_rheobase) / sharpness)) / tau
        s = 1 if h >= threshold else 0, then the reset of `LIF`

    The exponential is not rounded exactly: kernels match the reference approximately, see
    docs/conventions.md, Dtypes. A soft reset may leave the potential where it grows without bound.

    Shapes: `x`, spikes: `[T, B, ...]` (float32, bfloat16 or float16); `v`: `[B, ...]` (float32).

    Source: Fourcaud-Trocme et al., "How Spike Generation Mechanisms Determine the Neuronal
    Response to Fluctuating Inputs", Journal of Neuroscience 23, 2003 (its Delta_T is
    `sharpness`, its V_T `v_rheobase`).

    Example::

        neuron = sf.EIF(tau=10.0, v_rheobase=0.8, sharpness=0.2)
        spikes = neuron(torch.rand(100, 32, 128))

    Args:
        tau: membrane time constant in time steps, positive.
        v_rest: resting potential.
        v_rheobase: potential around which the exponential growth starts.
        sharpness: increase of the potential that multiplies the exponential by e, positive.
        threshold, v_reset, reset, detach_reset, surrogate: see `Firing`.

    Raises:
        TypeError, ValueError: a parameter has the wrong type or is out of range.
    """

    v = State()

    def __init__(
        self,
        tau: Value = 2.0,
        v_rest: Value = 0.0,
        v_rheobase: Value = 0.8,
        sharpness: Value = 1.0,
        threshold: Value = 1.0,
        *,
        v_reset: Value = 0.0,
        reset: Reset = "hard",
        detach_reset: bool = False,
        surrogate: Surrogate | None = None,
    ) -> None:
        super().__init__(
            threshold, v_reset=v_reset, reset=reset, detach_reset=detach_reset, surrogate=surrogate
        )
        self.tau = self._option("tau", tau, positive)
        self.v_rest = self._option("v_rest", v_rest, number)
        self.v_rheobase = self._option("v_rheobase", v_rheobase, number)
        self.sharpness = self._option("sharpness", sharpness, positive)

    def step(self, x: Tensor, v: Tensor) -> tuple[Tensor, States]:
        s, v = self.fire(self.charge(x, v), self.threshold)
        return s, (v,)

    def charge(self, x: Tensor, v: Tensor) -> Tensor:
        """Return the potential before the reset."""
        upswing = self.sharpness * torch.exp((v - self.v_rheobase) * (1 / self.sharpness))
        return v + (x + self.v_rest - v + upswing) * (1 / self.tau)
