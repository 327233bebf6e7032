"""Leaky integrate-and-fire with an adaptation current."""

from __future__ import annotations

from torch import Tensor

from spikefuse.neurons.definition import State, States
from spikefuse.neurons.firing import Firing, Reset
from spikefuse.neurons.parameters import Value, fraction, number
from spikefuse.neurons.surrogate import Surrogate


class AdLIF(Firing):
    """Adaptive LIF neuron: a second variable follows the potential and subtracts from the input.

    Equation, per time step, with potential `v`, adaptation `w`, input `x`, spike `s`::

        h = decay * v + (1 - decay) * (x - w)
        s = 1 if h >= threshold else 0
        v = h - threshold * s                  (soft reset, the default)
        v = h * (1 - s) + v_reset * s          (hard reset)
        w = adaptation_decay * w + coupling * h + jump * s

    Shapes: `x`, spikes: `[T, B, ...]` (float32, bfloat16 or float16); `v`, `w`: `[B, ...]`
    (float32).

    Source: Bittar and Garner, "A surrogate gradient spiking baseline for speech command
    recognition", Frontiers in Neuroscience 2022 (adLIF, in `Recurrent` RadLIF), as in the authors'
    sparch: its alpha, beta, a and b are `decay`, `adaptation_decay`, `coupling` and `jump`, one
    value each per neuron, learned between exp(-1/5) and exp(-1/25), exp(-1/30) and exp(-1/120), -1
    and 1, 0 and 2. sparch starts from random states.

    Example::

        neuron = sf.AdLIF(adaptation_decay=0.98, jump=1.0)
        spikes, w = neuron(torch.rand(100, 32, 128), outputs=("spikes", "w"))  # w rises at spikes

    Args:
        decay: factor of the previous potential, in [0, 1].
        threshold: firing threshold.
        adaptation_decay: factor of the previous adaptation, in [0, 1].
        coupling: increase of the adaptation per unit of potential.
        jump: increase of the adaptation per spike.
        reset, v_reset, detach_reset, surrogate: see `Firing`.

    Raises:
        TypeError, ValueError: a parameter has the wrong type or is out of range.
    """

    v, w = State(), State()

    def __init__(
        self,
        decay: Value = 0.9,
        threshold: Value = 1.0,
        adaptation_decay: Value = 0.98,
        coupling: Value = 0.5,
        jump: Value = 1.0,
        *,
        reset: Reset = "soft",
        v_reset: Value = 0.0,
        detach_reset: bool = False,
        surrogate: Surrogate | None = None,
    ) -> None:
        super().__init__(
            threshold, reset=reset, v_reset=v_reset, detach_reset=detach_reset, surrogate=surrogate
        )
        self.decay = self._option("decay", decay, fraction)
        self.adaptation_decay = self._option("adaptation_decay", adaptation_decay, fraction)
        self.coupling = self._option("coupling", coupling, number)
        self.jump = self._option("jump", jump, number)

    def step(self, x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, States]:
        h = self.charge(x, v, w)
        s, v = self.fire(h, self.threshold)
        return s, (v, self.adaptation_decay * w + self.coupling * h + self.jump * s)

    def charge(self, x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        """Return the potential before the reset."""
        return self.decay * v + (1 - self.decay) * (x - w)
