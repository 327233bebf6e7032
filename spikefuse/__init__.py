"""spikefuse: spiking neural networks in PyTorch, fused over time."""

import os as _os
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

# PyTorch then asks Linux for pages of 2 MiB for large tensors on the CPU, whose page faults take
# up to half of a training step otherwise. It reads this when it first allocates a tensor.
_os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

from spikefuse import distributed, memory
from spikefuse.compiler import UnsupportedOperation
from spikefuse.graph import captured as _captured  # noqa: F401, serves the policy Checkpoint
from spikefuse.neurons import (
    ALIF,
    BRF,
    CLIF,
    EIF,
    IF,
    KLIF,
    LI,
    LIF,
    PLIF,
    QIF,
    AdEx,
    AdLIF,
    AlphaLIF,
    CSiLIF,
    CubaLIF,
    DelayedResetLIF,
    GatedLIF,
    IntegerLIF,
    Izhikevich,
    Learnable,
    LearnableFraction,
    LearnablePositive,
    LearnableTimeConstant,
    Neuron,
    RateIF,
    RefractoryLIF,
    SEAdLIF,
    ShortTermPlasticity,
    SlidingPSN,
    State,
    StochasticLIF,
    TernaryLIF,
    TwoCompartmentLIF,
    decay_from_tau,
    surrogate,
)
from spikefuse.nn import (
    PSN,
    Delay,
    DelayedLinear,
    Loop,
    Online,
    OverTime,
    Recurrent,
    StepScale,
    Stream,
    Temporal,
    checkpoint,
    fuse,
)

if _TYPE_CHECKING:
    from spikefuse import data, models, train
    from spikefuse.inspect import plots
    from spikefuse.inspect.explain import explain
    from spikefuse.inspect.record import record
    from spikefuse.inspect.report import report
    from spikefuse.inspect.source import source
    from spikefuse.nn import plasticity
    from spikefuse.train.predict import load
    from spikefuse.transforms.convert import convert
    from spikefuse.transforms.export import exportable
    from spikefuse.transforms.from_ann import from_ann
    from spikefuse.transforms.graph_step import graph_step
    from spikefuse.transforms.integers import to_integers
    from spikefuse.transforms.nir_read import from_nir
    from spikefuse.transforms.nir_write import to_nir
    from spikefuse.transforms.quantize import quantize
    from spikefuse.transforms.spiking import spiking
    from spikefuse.transforms.unroll import unroll_integer_spikes

__version__ = "0.2.0.dev0"

__all__ = [
    "ALIF",
    "BRF",
    "CLIF",
    "EIF",
    "IF",
    "KLIF",
    "LI",
    "LIF",
    "PLIF",
    "PSN",
    "QIF",
    "AdEx",
    "AdLIF",
    "AlphaLIF",
    "CSiLIF",
    "CubaLIF",
    "Delay",
    "DelayedLinear",
    "DelayedResetLIF",
    "GatedLIF",
    "IntegerLIF",
    "Izhikevich",
    "Learnable",
    "LearnableFraction",
    "LearnablePositive",
    "LearnableTimeConstant",
    "Loop",
    "Neuron",
    "Online",
    "OverTime",
    "RateIF",
    "Recurrent",
    "RefractoryLIF",
    "SEAdLIF",
    "ShortTermPlasticity",
    "SlidingPSN",
    "State",
    "StepScale",
    "StochasticLIF",
    "Stream",
    "Temporal",
    "TernaryLIF",
    "TwoCompartmentLIF",
    "UnsupportedOperation",
    "__version__",
    "checkpoint",
    "convert",
    "data",
    "decay_from_tau",
    "distributed",
    "explain",
    "exportable",
    "from_ann",
    "from_nir",
    "fuse",
    "graph_step",
    "load",
    "memory",
    "models",
    "plasticity",
    "plots",
    "quantize",
    "record",
    "report",
    "source",
    "spiking",
    "surrogate",
    "to_integers",
    "to_nir",
    "train",
    "unroll_integer_spikes",
]


# What most programs do not need, and the modules that have it.
_MODULES = {
    "data": "data",
    "models": "models",
    "plasticity": "nn.plasticity",
    "plots": "inspect.plots",
    "train": "train",
}
_FUNCTIONS = {
    "convert": "transforms.convert",
    "explain": "inspect.explain",
    "exportable": "transforms.export",
    "from_ann": "transforms.from_ann",
    "from_nir": "transforms.nir_read",
    "graph_step": "transforms.graph_step",
    "load": "train.predict",
    "quantize": "transforms.quantize",
    "record": "inspect.record",
    "report": "inspect.report",
    "source": "inspect.source",
    "spiking": "transforms.spiking",
    "to_integers": "transforms.integers",
    "to_nir": "transforms.nir_write",
    "unroll_integer_spikes": "transforms.unroll",
}


def __getattr__(name: str) -> _Any:
    """Import what most programs do not need when it is first used."""
    if name in _MODULES:
        return _import_module(f"spikefuse.{_MODULES[name]}")
    if name in _FUNCTIONS:
        return getattr(_import_module(f"spikefuse.{_FUNCTIONS[name]}"), name)
    raise AttributeError(f"module 'spikefuse' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
