"""Izhikevich neuron."""

from __future__ import annotations

from torch import Tensor

from spikefuse.neurons.definition import State, States
from spikefuse.neurons.firing import Reset
from spikefuse.neurons.parameters import Value, number, positive
from spikefuse.neurons.qif import QIF
from spikefuse.neurons.surrogate import Surrogate


class Izhikevich(QIF):
    """Izhikevich neuron: `QIF` with a recovery variable `w` that pulls the potential back.

    Equation, per time step (forward Euler), with potential `v`, input `x`, spike `s`::

        h = v + (x - w + a0 * (v - v_rest) * (v - v_critical)) / tau
        s = 1 if h >= threshold else 0, then the reset of `LIF`
        w = w + (coupling * (h - v_rest) - w) / tau_recovery + jump * s

    The paper's units (mV, ms) and parameters (a, b, c, d) correspond to `tau=1, a0=0.04,
    v_rest=-82.66, v_critical=-42.34, tau_recovery=1/a, coupling=b, v_reset=c, jump=d,
    threshold=30`, with `u = w + b * v_rest` and `I = x + b * v_rest`. In these units, pass a state
    near the resting potential instead of starting from 0.

    Shapes: `x`, spikes: `[T, B, ...]` (float32, bfloat16 or float16); `v`, `w`: `[B, ...]`
    (float32).

    Source: Izhikevich, "Simple Model of Spiking Neurons", IEEE Transactions on Neural Networks
    14, 2003.

    Example::

        neuron = sf.Izhikevich(tau_recovery=20.0, jump=0.2)
        spikes, w = neuron(torch.rand(100, 32, 128), outputs=("spikes", "w"))  # w rises at spikes

    Args:
        tau, v_rest, v_critical, a0: see `QIF`.
        tau_recovery: time constant of the recovery in time steps, positive.
        coupling: strength of the coupling of the recovery to the potential.
        jump: increase of the recovery at a spike.
        threshold, v_reset, reset, detach_reset, surrogate: see `Firing`.

    Raises:
        TypeError, ValueError: a parameter has the wrong type or is out of range.
    """

    w = State()

    def __init__(
        self,
        tau: Value = 2.0,
        v_rest: Value = 0.0,
        v_critical: Value = 0.8,
        a0: Value = 1.0,
        tau_recovery: Value = 2.0,
        coupling: Value = 0.1,
        jump: Value = 0.2,
        threshold: Value = 1.0,
        *,
        v_reset: Value = 0.0,
        reset: Reset = "hard",
        detach_reset: bool = False,
        surrogate: Surrogate | None = None,
    ) -> None:
        super().__init__(
            tau,
            v_rest,
            v_critical,
            a0,
            threshold,
            v_reset=v_reset,
            reset=reset,
            detach_reset=detach_reset,
            surrogate=surrogate,
        )
        self.tau_recovery = self._option("tau_recovery", tau_recovery, positive)
        self.coupling = self._option("coupling", coupling, number)
        self.jump = self._option("jump", jump, number)

    def step(  # type: ignore[override]
        self, x: Tensor, v: Tensor, w: Tensor
    ) -> tuple[Tensor, States]:
        h = self.charge(x - w, v)
        s, v = self.fire(h, self.threshold)
        follow = (self.coupling * (h - self.v_rest) - w) * (1 / self.tau_recovery)
        return s, (v, w + follow + self.jump * s)
