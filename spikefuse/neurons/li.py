"""Leaky integrator."""

from __future__ import annotations

from torch import Tensor

from spikefuse.neurons.definition import Neuron, State, States
from spikefuse.neurons.lif import leaky
from spikefuse.neurons.parameters import Value, flag, fraction


class LI(Neuron):
    """Leaky integrator: outputs its potential and never fires. Use it as a readout or a synapse.

    Equation, per time step, with potential `v`, input `x`::

        v = decay * v + x, or decay * v + (1 - decay) * x with decay_input

    Shapes: `x`, output: `[T, B, ...]` (float32, bfloat16 or float16); `v`: `[B, ...]` (float32).

    Source: Gerstner et al., "Neuronal Dynamics", Cambridge University Press, 2014, chapter 1;
    as a readout, Bellec et al., "Long short-term memory and learning-to-learn in networks of
    spiking neurons", NeurIPS 2018.

    Example::

        readout = sf.LI(decay=0.9)
        logits = readout(torch.randn(8, 32, 10))[-1]  # the potential after the last step, [32, 10]

    Args:
        decay: factor of the previous potential, in [0, 1].
        decay_input: scale the input by `1 - decay`.

    Raises:
        TypeError, ValueError: a parameter has the wrong type or is out of range.
    """

    v = State()

    def __init__(self, decay: Value = 0.5, *, decay_input: bool = False) -> None:
        super().__init__()
        self.decay = self._option("decay", decay, fraction)
        self.decay_input = self._option("decay_input", decay_input, flag)

    def step(self, x: Tensor, v: Tensor) -> tuple[Tensor, States]:
        v = leaky(x, v, self.decay, self.decay_input)
        self.expose(h=v)
        return v, (v,)
