"""Quadratic integrate-and-fire."""

from __future__ import annotations

from torch import Tensor

from spikefuse.neurons.definition import State, States
from spikefuse.neurons.firing import Firing, Reset
from spikefuse.neurons.parameters import Value, number, positive
from spikefuse.neurons.surrogate import Surrogate


class QIF(Firing):
    """Quadratic integrate-and-fire neuron: above `v_critical` the potential grows by itself.

    Equation, per time step (forward Euler), with potential `v`, input `x`, spike `s`::

        h = v + (x + a0 * (v - v_rest) * (v - v_critical)) / tau
        s = 1 if h >= threshold else 0, then the reset of `LIF`

    A soft reset may leave the potential above `v_critical`, where it grows without bound.

    Shapes: `x`, spikes: `[T, B, ...]` (float32, bfloat16 or float16); `v`: `[B, ...]` (float32).

    Source: Latham et al., "Intrinsic Dynamics in Neuronal Networks", Journal of Neurophysiology
    83, 2000; Gerstner et al., "Neuronal Dynamics", Cambridge University Press, 2014, section 5.3.

    Example::

        neuron = sf.QIF(tau=10.0, v_critical=0.8)
        spikes = neuron(torch.rand(100, 32, 128))

    Args:
        tau: membrane time constant in time steps, positive.
        v_rest: resting potential, the lower zero of the quadratic.
        v_critical: critical potential, the upper zero of the quadratic.
        a0: steepness of the quadratic.
        threshold, v_reset, reset, detach_reset, surrogate: see `Firing`.

    Raises:
        TypeError, ValueError: a parameter has the wrong type or is out of range.
    """

    v = State()

    def __init__(
        self,
        tau: Value = 2.0,
        v_rest: Value = 0.0,
        v_critical: Value = 0.8,
        a0: Value = 1.0,
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
        self.v_critical = self._option("v_critical", v_critical, number)
        self.a0 = self._option("a0", a0, number)

    def step(self, x: Tensor, v: Tensor) -> tuple[Tensor, States]:
        s, v = self.fire(self.charge(x, v), self.threshold)
        return s, (v,)

    def charge(self, x: Tensor, v: Tensor) -> Tensor:
        """Return the potential before the reset."""
        drive = self.a0 * (v - self.v_rest) * (v - self.v_critical)
        # 1 / tau is computed once; a division per step would be slow.
        return v + (x + drive) * (1 / self.tau)
