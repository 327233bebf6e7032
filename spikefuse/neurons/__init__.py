"""Neuron models: what they compute, not how. Each file is one model."""

from spikefuse.neurons.alif import ALIF
from spikefuse.neurons.definition import Definition, Learnable, LearnableFraction, State
from spikefuse.neurons.if_ import IF
from spikefuse.neurons.lif import LIF, decay_from_tau
from spikefuse.neurons.plif import PLIF

__all__ = [
    "ALIF",
    "IF",
    "LIF",
    "PLIF",
    "Definition",
    "Learnable",
    "LearnableFraction",
    "State",
    "decay_from_tau",
]
