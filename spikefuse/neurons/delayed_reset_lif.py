"""Leaky integrate-and-fire whose reset acts one time step after the spike."""

from __future__ import annotations

from torch import Tensor

from spikefuse.neurons.definition import States
from spikefuse.neurons.firing import Reset
from spikefuse.neurons.lif import LIF
from spikefuse.neurons.parameters import Value
from spikefuse.neurons.surrogate import Surrogate


class DelayedResetLIF(LIF):
    """LIF neuron whose reset acts one time step after the spike, as in snnTorch by default.

    Equation, per time step, with potential `v`, input `x`, spike `s`::

        r = 1 if v >= threshold else 0                                  (the previous spike)
        v = decay * v + x - threshold * r                               (soft reset)
        v = decay * (v * (1 - r) + v_reset * r) + x                     (hard reset)
        s = 1 if v >= threshold else 0

    The soft reset subtracts a threshold that has not decayed. The hard reset gives the spikes of
    `LIF`. The state `v` is the potential before the reset. With `decay_input`, x is scaled by
    `1 - decay`.

    Shapes: `x`, spikes: `[T, B, ...]` (float32, bfloat16 or float16); `v`: `[B, ...]` (float32).

    Source: Eshraghian et al., "Training Spiking Neural Networks Using Lessons From Deep Learning",
    Proceedings of the IEEE 111, 2023: snnTorch's `Leaky` with `reset_delay=True`, its default;
    `reset_mechanism="subtract"` is the soft reset and `"zero"` the hard one.

    Args:
        decay: factor of the previous potential, in [0, 1].
        threshold, decay_input, v_reset, surrogate: see `LIF`.
        reset: "soft" or "hard".
        detach_reset: stop gradients through the reset, as snnTorch does.

    Raises:
        TypeError, ValueError: a parameter has the wrong type or is out of range.
    """

    def __init__(
        self,
        decay: Value = 0.5,
        threshold: Value = 1.0,
        *,
        reset: Reset = "soft",
        detach_reset: bool = True,
        decay_input: bool = False,
        v_reset: Value = 0.0,
        surrogate: Surrogate | None = None,
    ) -> None:
        super().__init__(
            decay,
            threshold,
            reset=reset,
            detach_reset=detach_reset,
            decay_input=decay_input,
            v_reset=v_reset,
            surrogate=surrogate,
        )

    def step(self, x: Tensor, v: Tensor) -> tuple[Tensor, States]:
        r = self.surrogate(v - self.threshold)
        if self.reset == "hard":
            v = self.charge(x, self.after(v, r, self.threshold))
        else:
            v = self.after(self.charge(x, v), r, self.threshold)
        self.expose(h=v)
        return self.surrogate(v - self.threshold), (v,)
