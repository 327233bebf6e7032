"""A neuron that no library has: two inputs, two states, two outputs; and SpikingJelly's FlexSN,
which makes kernels of such a step too."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

import spikefuse as sf
from benchmarks import layer
from benchmarks.runner import Contender, first_line

DECAY, RHO, BETA, THRESHOLD, WIDTH = 0.9, 0.97, 0.18, 1.0, 4.0
RIVAL = "SpikingJelly FlexSN"


class Gated(sf.Neuron):
    """An adaptive threshold, and a reset that the second input moves between hard and soft::

        h = decay * v + x,   theta = threshold + beta * a,   s = 1 if h >= theta else 0
        v = h - s * (g * h + (1 - g) * theta)   with   g = sigmoid(gate)
        a = rho * a + s

    Outputs are the spike and the potential before the reset.
    """

    v, a = sf.State(), sf.State()

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.rho, self.beta, self.threshold = DECAY, RHO, BETA, THRESHOLD
        self.surrogate = sf.surrogate.Sigmoid(WIDTH)

    def step(self, x, gate, v, a):
        h = self.decay * v + x
        theta = self.threshold + self.beta * a
        s = self.surrogate(h - theta)
        g = torch.sigmoid(gate)
        return (s, h), (h - s * (g * h + (1 - g) * theta), self.rho * a + s)


def rival(inputs: layer.Inputs) -> Contender:
    """FlexSN: on a GPU it makes Triton kernels, one pair per T, and tunes their block size."""
    try:
        neuron, surrogate = (
            importlib.import_module(f"spikingjelly.activation_based.{name}")
            for name in ("neuron", "surrogate")
        )
        fire = surrogate.Sigmoid.spiking_function

        def core(x: Tensor, gate: Tensor, v: Tensor, a: Tensor) -> tuple[Tensor, ...]:
            h = DECAY * v + x
            theta = THRESHOLD + BETA * a
            s = fire(h - theta, WIDTH)
            g = torch.sigmoid(gate)
            return s, h, h - s * (g * h + (1 - g) * theta), RHO * a + s

        node = neuron.FlexSN(core, num_states=2)
    except Exception as error:  # whatever it is: the reason is the result
        return Contender(RIVAL, unavailable=first_line(error))

    def run(x: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = node(x, gate)
        node.reset()
        return outputs

    return layer.contender(RIVAL, run, inputs, "constants compiled in, kernels chosen by FlexSN")
