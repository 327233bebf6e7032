"""Adaptive leaky integrate-and-fire, discretized by the symplectic Euler method."""

from __future__ import annotations

from torch import Tensor

from spikefuse.neurons.ad_lif import AdLIF
from spikefuse.neurons.definition import States
from spikefuse.neurons.firing import Reset
from spikefuse.neurons.parameters import Value
from spikefuse.neurons.surrogate import Surrogate


class SEAdLIF(AdLIF):
    """Adaptive LIF neuron whose adaptation follows the potential after the reset.

    Equation, per time step, with potential `v`, adaptation `w`, input `x`, spike `s`::

        h = decay * v + (1 - decay) * (x - w)
        s = 1 if h >= threshold else 0, then the reset of `LIF`, hard by default
        w = adaptation_decay * w + (1 - adaptation_decay) * (coupling * v + jump * s)

    Because the adaptation reads the new potential, oscillations of the two decay as they do in
    continuous time; with the previous potential (explicit Euler) they may grow.

    Shapes: `x`, spikes: `[T, B, ...]` (float32, bfloat16 or float16); `v`, `w`: `[B, ...]`
    (float32).

    Source: Baronig et al., "Advancing spatio-temporal processing through adaptation in spiking
    neural networks", Nature Communications 2025, arXiv:2408.07517 (SE-adLIF). `coupling` and `jump`
    are its a and b times its factor q, one value each per neuron; the authors' code detaches the
    reset, learns the time constants of both decays, and keeps a in [0, 1] and b in [0, 2].

    Args:
        decay: factor of the previous potential, in [0, 1].
        threshold: firing threshold.
        adaptation_decay: factor of the previous adaptation, in [0, 1].
        coupling: adaptation that a constant potential of 1 approaches.
        jump: adaptation that a spike in every step approaches, without coupling.
        reset, v_reset, detach_reset, surrogate: see `Firing`.

    Raises:
        TypeError, ValueError: a parameter has the wrong type or is out of range.
    """

    def __init__(
        self,
        decay: Value = 0.9,
        threshold: Value = 1.0,
        adaptation_decay: Value = 0.99,
        coupling: Value = 30.0,
        jump: Value = 60.0,
        *,
        reset: Reset = "hard",
        v_reset: Value = 0.0,
        detach_reset: bool = False,
        surrogate: Surrogate | None = None,
    ) -> None:
        super().__init__(
            decay,
            threshold,
            adaptation_decay,
            coupling,
            jump,
            reset=reset,
            v_reset=v_reset,
            detach_reset=detach_reset,
            surrogate=surrogate,
        )

    def step(self, x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, States]:
        s, v = self.fire(self.charge(x, v, w), self.threshold)
        target = self.coupling * v + self.jump * s
        return s, (v, self.adaptation_decay * w + (1 - self.adaptation_decay) * target)
