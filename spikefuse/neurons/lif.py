"""Leaky integrate-and-fire."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor

from spikefuse.neurons.definition import State, States
from spikefuse.neurons.firing import Firing, Reset
from spikefuse.neurons.parameters import Value, flag, fraction, number
from spikefuse.neurons.surrogate import Surrogate

Tau = TypeVar("Tau", float, Tensor)


def decay_from_tau(tau: Tau, dt: float = 1.0, exact: bool = False) -> Tau:
    """Return the decay that corresponds to a membrane time constant, or the decays of a tensor.

    Example::

        neuron = sf.LIF(decay=sf.decay_from_tau(20.0, dt=1.0))  # 20 ms in steps of 1 ms: 0.95
        spikes = neuron(torch.rand(100, 32, 128))

    Args:
        tau: time constant, in the unit of `dt`; a number or a tensor.
        dt: duration of a time step.
        exact: `exp(-dt / tau)`, the solution of the membrane equation over one step; otherwise
            its first-order form `1 - dt / tau`, which SpikingJelly uses (k_tau = 1 - 1/tau in
            Li et al., "Towards Scalable GPU-Accelerated SNN Training via Temporal Fusion").

    Raises:
        TypeError: `tau` or `dt` is not a number.
        ValueError: `tau` or `dt` is not positive and finite, or `tau < dt` without `exact`.
    """
    for name, value in (("tau", tau), ("dt", dt)):
        if not isinstance(value, Tensor):
            number(name, value)
    least, most = (tau.min(), tau.max()) if isinstance(tau, Tensor) else (tau, tau)
    if not (least > 0 and dt > 0 and math.isfinite(most) and math.isfinite(dt)):
        raise ValueError(f"tau, dt are {tau!r}, {dt!r}: expected positive finite numbers")
    if exact:
        return torch.exp(-dt / tau) if isinstance(tau, Tensor) else math.exp(-dt / tau)
    if least < dt:
        raise ValueError(f"tau is {tau!r}: expected at least dt = {dt!r}, or exact=True")
    return 1 - dt / tau


def leaky(x: Tensor, v: Tensor, decay: Tensor, decay_input: bool) -> Tensor:
    """Return `decay * v + x`, or `decay * v + (1 - decay) * x` with `decay_input`."""
    return decay * v + ((1 - decay) * x if decay_input else x)


class LIF(Firing):
    """Leaky integrate-and-fire neuron.

    Equation, per time step, with potential `v`, input `x`, spike `s`::

        h = decay * v + x                       (charge)
        s = 1 if h >= threshold else 0          (fire)
        v = h * (1 - s) + v_reset * s           (hard reset)
        v = h - threshold * s                   (soft reset)

    With `decay_input`, h = decay * v + (1 - decay) * x, so that a constant input x drives the
    potential to x for every decay.

    Shapes: `x`, spikes: `[T, B, ...]` (float32, bfloat16 or float16); `v`: `[B, ...]` (float32).

    Source: Li et al., "Towards Scalable GPU-Accelerated SNN Training via Temporal Fusion",
    Eqs. 1 to 3 (`decay` is its k_tau, `threshold` its V_th; v_reset = 0).

    Example::

        neuron = sf.LIF(decay=0.9, reset="soft")
        spikes = neuron(torch.rand(8, 32, 128))  # 0 or 1, [T, B, C]

    Args:
        decay: factor of the previous potential per time step, in [0, 1].
        decay_input: scale the input by `1 - decay`.
        threshold, v_reset, reset, detach_reset, surrogate: see `Firing`.

    Raises:
        TypeError, ValueError: a parameter has the wrong type or is out of range.
    """

    v = State()

    def __init__(
        self,
        decay: Value = 0.5,
        threshold: Value = 1.0,
        *,
        decay_input: bool = False,
        v_reset: Value = 0.0,
        reset: Reset = "hard",
        detach_reset: bool = False,
        surrogate: Surrogate | None = None,
    ) -> None:
        super().__init__(
            threshold, v_reset=v_reset, reset=reset, detach_reset=detach_reset, surrogate=surrogate
        )
        self.decay = self._option("decay", decay, fraction)
        self.decay_input = self._option("decay_input", decay_input, flag)

    def step(self, x: Tensor, v: Tensor) -> tuple[Tensor, States]:
        s, v = self.fire(self.charge(x, v), self.threshold)
        return s, (v,)

    def charge(self, x: Tensor, v: Tensor) -> Tensor:
        """Return the potential before the reset."""
        return leaky(x, v, self.decay, self.decay_input)
