"""Leaky integrator."""

from __future__ import annotations

from torch import Tensor

from spikefuse.neurons.definition import Definition, State, States, number
from spikefuse.neurons.firing import Value
from spikefuse.neurons.lif import leaky


class LI(Definition):
    """Leaky integrator: the potential is the output, and nothing fires. A readout, or a synapse.

    Equation, per time step, with potential `v`, input `x`::

        v = decay * v + x, or decay * v + (1 - decay) * x with decay_input

    Shapes: `x` and the output are `[T, B, ...]`; the state `v` is `[B, ...]` in float32.

    Source: Gerstner et al., "Neuronal Dynamics", Cambridge University Press, 2014, chapter 1;
    as a readout, Bellec et al., "Long short-term memory and learning-to-learn in networks of
    spiking neurons", NeurIPS 2018.

    Args:
        decay: factor of the previous potential, in [0, 1].
        decay_input: scale the input by `1 - decay`.
    """

    v = State()

    def __init__(self, decay: Value = 0.5, *, decay_input: bool = False) -> None:
        super().__init__()
        self.decay = number("decay", decay, 0.0, 1.0)
        self.decay_input = bool(decay_input)

    def step(self, x: Tensor, v: Tensor) -> tuple[Tensor, States]:
        v = leaky(x, v, self.decay, self.decay_input)
        return v, (v,)
