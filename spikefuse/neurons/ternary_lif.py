"""Leaky integrate-and-fire with signed spikes."""

from __future__ import annotations

from torch import Tensor

from spikefuse.neurons.definition import States
from spikefuse.neurons.firing import Reset
from spikefuse.neurons.lif import LIF
from spikefuse.neurons.parameters import Value, positive
from spikefuse.neurons.surrogate import Surrogate


class TernaryLIF(LIF):
    """LIF neuron with signed spikes: it emits -1, 0 or 1.

    Equation, per time step, with potential `v`, input `x`, spike `s` and the `h` of `LIF`::

        p = 1 if h >= threshold else 0
        n = 1 if -h >= threshold else 0
        s = p - n
        v = h * (1 - p - n) + v_reset * (p + n) (hard reset)
        v = h - threshold * s                   (soft reset)

    The surrogate replaces the derivatives of `p` and `n`.

    Shapes: `x`, spikes: `[T, B, ...]` (float32, bfloat16 or float16); `v`: `[B, ...]` (float32).

    Source: Guo et al., "Ternary Spike: Learning Ternary Spikes for Spiking Neural Networks",
    AAAI 2024.

    Example::

        neuron = sf.TernaryLIF(threshold=1.0)
        spikes = neuron(torch.randn(8, 32, 128))  # -1, 0 or 1

    Args:
        decay: factor of the previous potential, in [0, 1].
        threshold: absolute value of both thresholds, positive.
        decay_input, v_reset, reset, detach_reset, surrogate: see `LIF`.

    Raises:
        TypeError, ValueError: a parameter has the wrong type or is out of range.
    """

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
            decay,
            self._option("threshold", threshold, positive),
            decay_input=decay_input,
            v_reset=v_reset,
            reset=reset,
            detach_reset=detach_reset,
            surrogate=surrogate,
        )

    def step(self, x: Tensor, v: Tensor) -> tuple[Tensor, States]:
        h = self.charge(x, v)
        self.expose(h=h)
        above = self.surrogate(h - self.threshold)
        below = self.surrogate(-h - self.threshold)
        s = above - below
        event = above + below if self.reset == "hard" else s
        return s, (self.after(h, event, self.threshold),)
