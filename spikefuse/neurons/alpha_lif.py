"""Leaky integrate-and-fire with alpha-shaped synapses."""

from __future__ import annotations

import math

from torch import Tensor

from spikefuse.neurons.definition import State, States
from spikefuse.neurons.firing import Firing, Reset
from spikefuse.neurons.parameters import Value, fraction, number
from spikefuse.neurons.surrogate import Surrogate


class AlphaLIF(Firing):
    """LIF neuron whose response to an input is an alpha function: it rises, then falls.

    Equation, per time step, with an excitatory trace `e`, an inhibitory trace `i`, input `x`,
    spike `s`::

        e = excitatory_decay * e + x
        i = inhibitory_decay * i - x
        h = gain * (e + i)
        s = 1 if h >= threshold else 0
        e = e * (1 - s),  i = i * (1 - s)       (hard reset, to a potential of 0)
        e = e - threshold / gain * s            (soft reset: h falls by the threshold)

    In the step in which an input arrives, the traces cancel. It takes effect one step later.

    Shapes: `x`, spikes: `[T, B, ...]` (float32, bfloat16 or float16); `e`, `i`: `[B, ...]`
    (float32).

    Source: Gerstner et al., "Neuronal Dynamics", Cambridge University Press, 2014, chapter 1
    and section 6.4 (spike response model); in discrete time, Eshraghian et al., "Training
    Spiking Neural Networks Using Lessons From Deep Learning", Proceedings of the IEEE 111, 2023.

    Example::

        neuron = sf.AlphaLIF(excitatory_decay=0.9, inhibitory_decay=0.8)
        spikes, h = neuron(torch.rand(100, 32, 128), outputs=("spikes", "h"))  # h[0] is 0

    Args:
        excitatory_decay: factor of the previous `e`, in [0, 1], larger than `inhibitory_decay`.
        inhibitory_decay: factor of the previous `i`, in [0, 1].
        threshold, reset, detach_reset, surrogate: see `Firing`.
        gain: scale of the potential. By default, `log(inhibitory_decay) /
            log(inhibitory_decay / excitatory_decay)`; the decays must then be floats in (0, 1).

    Raises:
        TypeError, ValueError: a parameter has the wrong type or is out of range.
    """

    e, i = State(), State()

    def __init__(
        self,
        excitatory_decay: Value = 0.9,
        inhibitory_decay: Value = 0.8,
        threshold: Value = 1.0,
        *,
        gain: Value | None = None,
        reset: Reset = "hard",
        detach_reset: bool = False,
        surrogate: Surrogate | None = None,
    ) -> None:
        super().__init__(threshold, 0.0, reset, detach_reset, surrogate)
        self.excitatory_decay = self._option("excitatory_decay", excitatory_decay, fraction)
        self.inhibitory_decay = self._option("inhibitory_decay", inhibitory_decay, fraction)
        if gain is None:
            gain = _gain(self.excitatory_decay, self.inhibitory_decay)
        self.gain = self._option("gain", gain, number)

    def step(self, x: Tensor, e: Tensor, i: Tensor) -> tuple[Tensor, States]:
        e = self.excitatory_decay * e + x
        i = self.inhibitory_decay * i - x
        h = self.gain * (e + i)
        self.expose(h=h)
        s = self.surrogate(h - self.threshold)
        r = s.detach() if self.detach_reset else s
        if self.reset == "hard":
            return s, (e * (1 - r), i * (1 - r))
        return s, (e - self.threshold / self.gain * r, i)


def _gain(excitatory: Value, inhibitory: Value) -> float:
    if not (isinstance(excitatory, float) and isinstance(inhibitory, float)):
        raise TypeError("gain is None: give it a value, since the decays are not both numbers")
    if not 0 < inhibitory < excitatory < 1:
        raise ValueError(
            f"excitatory_decay, inhibitory_decay are {excitatory!r}, {inhibitory!r}: expected "
            "0 < inhibitory_decay < excitatory_decay < 1, or a gain"
        )
    return math.log(inhibitory) / math.log(inhibitory / excitatory)
