"""spikefuse: spiking neural networks in PyTorch, fused over time."""

from spikefuse import surrogate
from spikefuse.compiler import UnsupportedOperation
from spikefuse.neurons import Learnable, LearnableFraction, State, decay_from_tau
from spikefuse.nn import ALIF, IF, LIF, PLIF, Neuron, Temporal, explain

__version__ = "0.1.0"

__all__ = [
    "ALIF",
    "IF",
    "LIF",
    "PLIF",
    "Learnable",
    "LearnableFraction",
    "Neuron",
    "State",
    "Temporal",
    "UnsupportedOperation",
    "__version__",
    "decay_from_tau",
    "explain",
    "surrogate",
]
