"""Leaky integrate-and-fire with a refractory period."""

from __future__ import annotations

import torch
from torch import Tensor

from spikefuse.neurons.definition import State, States
from spikefuse.neurons.firing import Reset
from spikefuse.neurons.lif import LIF
from spikefuse.neurons.parameters import Value, whole
from spikefuse.neurons.surrogate import Surrogate


class RefractoryLIF(LIF):
    """LIF neuron with an absolute refractory period after each spike.

    Equation, per time step, with potential `v`, remaining refractory steps `pause`, input `x`,
    spike `s`::

        pause > 0:   s = 0, v is unchanged, pause = pause - 1
        otherwise:   s and v as in `LIF`, pause = refractory * s

    During the refractory period, the input is ignored and receives no gradient.

    Shapes: `x`, spikes: `[T, B, ...]` (float32, bfloat16 or float16); `v`, `pause`: `[B, ...]`
    (float32).

    Source: Gerstner et al., "Neuronal Dynamics", Cambridge University Press, 2014, section 1.3.

    Example::

        neuron = sf.RefractoryLIF(refractory=3)
        spikes = neuron(2 * torch.rand(100, 32, 128))  # at most one in four steps

    Args:
        decay: factor of the previous potential, in [0, 1].
        refractory: refractory period in time steps, at least 0.
        decay_input, threshold, v_reset, reset, detach_reset, surrogate: see `LIF`.

    Raises:
        TypeError, ValueError: a parameter has the wrong type or is out of range.
    """

    pause = State()

    def __init__(
        self,
        decay: Value = 0.5,
        threshold: Value = 1.0,
        refractory: int = 2,
        *,
        decay_input: bool = False,
        v_reset: Value = 0.0,
        reset: Reset = "hard",
        detach_reset: bool = False,
        surrogate: Surrogate | None = None,
    ) -> None:
        super().__init__(
            decay,
            threshold,
            decay_input=decay_input,
            v_reset=v_reset,
            reset=reset,
            detach_reset=detach_reset,
            surrogate=surrogate,
        )
        self.refractory = self._option("refractory", refractory, whole, 0)

    def step(  # type: ignore[override]
        self, x: Tensor, v: Tensor, pause: Tensor
    ) -> tuple[Tensor, States]:
        is_refractory = pause > 0
        s, fired = self.fire(self.charge(x, v), self.threshold)
        s = torch.where(is_refractory, 0.0, s)
        pause = torch.where(is_refractory, pause - 1, self.refractory * s.detach())
        return s, (torch.where(is_refractory, v, fired), pause)
