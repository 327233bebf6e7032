"""Leaky integrate-and-fire with a refractory period."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spikefuse.neurons.definition import State, States
from spikefuse.neurons.firing import Value
from spikefuse.neurons.lif import LIF


class RefractoryLIF(LIF):
    """`LIF` that rests for some steps after each spike (absolute refractory period).

    Equation, per time step, with potential `v`, steps left to rest `pause`, input `x`, spike
    `s`::

        pause > 0:   s = 0, v stays as it is, pause = pause - 1
        otherwise:   s and v as in `LIF`, pause = refractory * s

    A resting neuron ignores its input, and gradients do not pass to it.

    Shapes: `x` and the spikes are `[T, B, ...]`; the states `v`, `pause` are `[B, ...]` in
    float32.

    Source: Gerstner et al., "Neuronal Dynamics", Cambridge University Press, 2014, section 1.3.

    Args:
        decay: factor of the previous potential, in [0, 1].
        refractory: number of steps to rest after a spike, 0 or more.
        decay_input, threshold, v_reset, reset, detach_reset, surrogate: see `LIF`.
    """

    pause = State()

    def __init__(
        self, decay: Value = 0.5, threshold: Value = 1.0, refractory: int = 2, **firing: Any
    ) -> None:
        super().__init__(decay, threshold, **firing)
        if isinstance(refractory, bool) or not isinstance(refractory, int) or refractory < 0:
            raise ValueError(f"refractory is {refractory!r}: expected a number of steps, 0 or more")
        # A run-time value: another number of steps compiles nothing.
        self.refractory = float(refractory)

    def step(  # type: ignore[override]
        self, x: Tensor, v: Tensor, pause: Tensor
    ) -> tuple[Tensor, States]:
        resting = pause > 0
        s, fired = self.fire(self.charge(x, v), self.threshold)
        s = torch.where(resting, 0.0, s)
        pause = torch.where(resting, pause - 1, self.refractory * s.detach())
        return s, (torch.where(resting, v, fired), pause)
