"""Integrate-and-fire."""

from __future__ import annotations

from torch import Tensor

from spikefuse.neurons.definition import State, States
from spikefuse.neurons.firing import Firing


class IF(Firing):
    """Integrate-and-fire neuron: `LIF` without leak.

    Equation, per time step, with potential `v`, input `x`, spike `s`::

        h = v + x
        s = 1 if h >= threshold else 0, then the reset of `LIF`

    Shapes: `x`, spikes: `[T, B, ...]` (float32, bfloat16 or float16); `v`: `[B, ...]` (float32).

    Source: Lapicque, Journal de Physiologie et de Pathologie Generale 9, 1907; Gerstner et al.,
    "Neuronal Dynamics", Cambridge University Press, 2014, chapter 1.

    Example::

        neuron = sf.IF(reset="soft")
        rates = neuron(torch.rand(100, 32, 128)).mean(0)  # close to the mean of the input

    Args:
        threshold, v_reset, reset, detach_reset, surrogate: see `Firing`.

    Raises:
        TypeError, ValueError: a parameter has the wrong type or is out of range.
    """

    v = State()

    def step(self, x: Tensor, v: Tensor) -> tuple[Tensor, States]:
        s, v = self.fire(v + x, self.threshold)
        return s, (v,)
