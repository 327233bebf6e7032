"""Two-compartment leaky integrate-and-fire."""

from __future__ import annotations

from torch import Tensor

from spikefuse.neurons.definition import State, States
from spikefuse.neurons.firing import Firing, Reset
from spikefuse.neurons.learnable import LearnableFraction
from spikefuse.neurons.parameters import Value, fraction, number
from spikefuse.neurons.surrogate import Surrogate


class TwoCompartmentLIF(Firing):
    """Two-compartment LIF neuron (TC-LIF): a dendrite provides long-term memory, the soma fires.

    Equation, per time step, with dendritic potential `dendrite`, somatic potential `soma`, input
    `x`, spike `s`::

        d = dendrite - feedback * soma + x
        h = soma + drive * d
        s = 1 if h >= threshold else 0
        dendrite = d - gamma * s,  soma = h - threshold * s     (soft reset, the default)

    A hard reset sets both potentials to `v_reset`. `feedback` and `drive` are learned fractions,
    `sigmoid(logit)`.

    Shapes: `x`, spikes: `[T, B, ...]` (float32, bfloat16 or float16); `dendrite`, `soma`: `[B,
    ...]` (float32).

    Source: Zhang et al., "TC-LIF: A Two-Compartment Spiking Neuron Model for Long-Term
    Sequential Modelling", AAAI 2024 (its beta_1 is `-feedback`, its beta_2 `drive`).

    Example::

        neuron = sf.TwoCompartmentLIF(channels=128)
        spikes, dendrite = neuron(torch.rand(100, 32, 128), outputs=("spikes", "dendrite"))

    Args:
        feedback: effect of the soma on the dendrite before training, strictly between 0 and 1.
        drive: effect of the dendrite on the soma before training, strictly between 0 and 1.
        gamma: decrease of the dendritic potential at a spike (soft reset only).
        channels: number of channels (dim 2 of `[T, B, C, ...]`), each with its own values; None
            for single values.
        threshold, v_reset, reset, detach_reset, surrogate: see `Firing`.

    Raises:
        TypeError, ValueError: a parameter has the wrong type or is out of range.
    """

    dendrite, soma = State(), State()

    def __init__(
        self,
        feedback: float = 0.5,
        drive: float = 0.5,
        threshold: Value = 1.0,
        gamma: Value = 0.5,
        channels: int | None = None,
        *,
        reset: Reset = "soft",
        v_reset: Value = 0.0,
        detach_reset: bool = False,
        surrogate: Surrogate | None = None,
    ) -> None:
        super().__init__(
            threshold, reset=reset, v_reset=v_reset, detach_reset=detach_reset, surrogate=surrogate
        )
        self.feedback = self._option("feedback", LearnableFraction(feedback, channels), fraction)
        self.drive = self._option("drive", LearnableFraction(drive, channels), fraction)
        self.gamma = self._option("gamma", gamma, number)

    def step(self, x: Tensor, dendrite: Tensor, soma: Tensor) -> tuple[Tensor, States]:
        d = dendrite - self.feedback * soma + x
        s, soma = self.fire(soma + self.drive * d, self.threshold)
        return s, (self.after(d, s, self.gamma), soma)
