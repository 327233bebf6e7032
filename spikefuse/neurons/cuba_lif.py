"""Current-based leaky integrate-and-fire."""

from __future__ import annotations

from torch import Tensor

from spikefuse.neurons.definition import State, States
from spikefuse.neurons.firing import Reset
from spikefuse.neurons.lif import LIF
from spikefuse.neurons.parameters import Value, fraction
from spikefuse.neurons.surrogate import Surrogate


class CubaLIF(LIF):
    """Current-based LIF neuron: the input passes through a synapse that decays exponentially.

    Equation, per time step, with potential `v`, synaptic current `current`, input `x`, spike `s`::

        current = current_decay * current + x
        h = decay * v + current, or decay * v + (1 - decay) * current with decay_input
        s = 1 if h >= threshold else 0, then the reset of `LIF`

    The input takes effect in the step in which it arrives. A reset does not change the current.

    Shapes: `x`, spikes: `[T, B, ...]` (float32, bfloat16 or float16); `v`, `current`: `[B, ...]`
    (float32).

    Source: Gerstner et al., "Neuronal Dynamics", Cambridge University Press, 2014, chapter 1;
    in discrete time, Neftci et al., "Surrogate Gradient Learning in Spiking Neural Networks",
    IEEE Signal Processing Magazine 36, 2019 (its alpha is `current_decay`, its beta `decay`).

    Example::

        neuron = sf.CubaLIF(current_decay=0.8, decay=0.9)
        spikes, current = neuron(torch.rand(100, 32, 128), outputs=("spikes", "current"))

    Args:
        current_decay: factor of the previous current, in [0, 1].
        decay: factor of the previous potential, in [0, 1].
        decay_input: scale the current by `1 - decay`.
        threshold, v_reset, reset, detach_reset, surrogate: see `Firing`.

    Raises:
        TypeError, ValueError: a parameter has the wrong type or is out of range.
    """

    current = State()

    def __init__(
        self,
        current_decay: Value = 0.5,
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
            threshold,
            decay_input=decay_input,
            v_reset=v_reset,
            reset=reset,
            detach_reset=detach_reset,
            surrogate=surrogate,
        )
        self.current_decay = self._option("current_decay", current_decay, fraction)

    def step(  # type: ignore[override]
        self, x: Tensor, v: Tensor, current: Tensor
    ) -> tuple[Tensor, States]:
        current = self.current_decay * current + x
        s, v = self.fire(self.charge(current, v), self.threshold)
        return s, (v, current)
