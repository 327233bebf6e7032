"""spikefuse: spiking neural networks in PyTorch, fused over time."""

from spikefuse import surrogate
from spikefuse.compiler import UnsupportedOperation
from spikefuse.neurons import (
    Learnable,
    LearnableFraction,
    LearnablePositive,
    LearnableTimeConstant,
    State,
    decay_from_tau,
)
from spikefuse.nn import (
    ALIF,
    CLIF,
    EIF,
    IF,
    KLIF,
    LI,
    LIF,
    PLIF,
    QIF,
    AlphaLIF,
    CubaLIF,
    GatedLIF,
    IntegerLIF,
    Izhikevich,
    Neuron,
    RefractoryLIF,
    Temporal,
    TernaryLIF,
    TwoCompartmentLIF,
    explain,
)

__version__ = "0.1.0"

__all__ = [
    "ALIF",
    "CLIF",
    "EIF",
    "IF",
    "KLIF",
    "LI",
    "LIF",
    "PLIF",
    "QIF",
    "AlphaLIF",
    "CubaLIF",
    "GatedLIF",
    "IntegerLIF",
    "Izhikevich",
    "Learnable",
    "LearnableFraction",
    "LearnablePositive",
    "LearnableTimeConstant",
    "Neuron",
    "RefractoryLIF",
    "State",
    "Temporal",
    "TernaryLIF",
    "TwoCompartmentLIF",
    "UnsupportedOperation",
    "__version__",
    "decay_from_tau",
    "explain",
    "surrogate",
]
