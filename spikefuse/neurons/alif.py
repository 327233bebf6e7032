"""Adaptive leaky integrate-and-fire."""

from __future__ import annotations

from torch import Tensor

from spikefuse.neurons.definition import State, States
from spikefuse.neurons.firing import Reset
from spikefuse.neurons.lif import LIF
from spikefuse.neurons.parameters import Value, fraction, number
from spikefuse.neurons.surrogate import Surrogate


class ALIF(LIF):
    """Adaptive LIF neuron: every spike raises the threshold temporarily.

    Equation, per time step, with potential `v`, adaptation `a`, input `x`, spike `s`::

        h = decay * v + x
        s = 1 if h >= threshold + beta * a else 0, then the reset of `LIF`
        a = adaptation_decay * a + s

    A soft reset subtracts the raised threshold.

    Shapes: `x`, spikes: `[T, B, ...]` (float32, bfloat16 or float16); `v`, `a`: `[B, ...]`
    (float32).

    Source: Bellec et al., "Long short-term memory and learning-to-learn in networks of spiking
    neurons", NeurIPS 2018 (its rho is `adaptation_decay`).

    Example::

        neuron = sf.ALIF(adaptation_decay=0.97, beta=0.18)
        spikes, a = neuron(torch.rand(100, 32, 128), outputs=("spikes", "a"))  # a rises at spikes

    Args:
        decay: factor of the previous potential, in [0, 1].
        threshold: firing threshold at rest.
        adaptation_decay: factor of the previous adaptation, in [0, 1].
        beta: increase of the threshold per unit of adaptation.
        decay_input, v_reset, reset, detach_reset, surrogate: see `LIF`.

    Raises:
        TypeError, ValueError: a parameter has the wrong type or is out of range.
    """

    a = State()

    def __init__(
        self,
        decay: Value = 0.5,
        threshold: Value = 1.0,
        adaptation_decay: Value = 0.97,
        beta: Value = 0.18,
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
        self.adaptation_decay = self._option("adaptation_decay", adaptation_decay, fraction)
        self.beta = self._option("beta", beta, number)

    def step(  # type: ignore[override]
        self, x: Tensor, v: Tensor, a: Tensor
    ) -> tuple[Tensor, States]:
        s, v = self.fire(self.charge(x, v), self.threshold + self.beta * a)
        return s, (v, self.adaptation_decay * a + s)
