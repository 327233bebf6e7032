"""spikefuse: spiking neural networks in PyTorch, fused over time."""

import os as _os
from importlib import import_module as _import_module
from typing import Any as _Any

# PyTorch then asks Linux for pages of 2 MiB for large tensors on the CPU, whose page faults take
# up to half of a training step otherwise. It reads this when it first allocates a tensor.
_os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

from spikefuse import distributed, memory
from spikefuse.compiler import UnsupportedOperation
from spikefuse.graph import captured as _captured  # noqa: F401, serves the policy Checkpoint
from spikefuse.neurons import (
    ALIF,
    CLIF,
    EIF,
    IF,
    KLIF,
    LI,
    LIF,
    PLIF,
    QIF,
    AdLIF,
    AlphaLIF,
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
    RefractoryLIF,
    SEAdLIF,
    State,
    TernaryLIF,
    TwoCompartmentLIF,
    decay_from_tau,
    surrogate,
)
from spikefuse.nn import (
    Recurrent,
    Stream,
    Temporal,
    checkpoint,
    explain,
    exportable,
    fuse,
    record,
    report,
    source,
    spiking,
)
from spikefuse.transforms.graph_step import graph_step

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
    "AdLIF",
    "AlphaLIF",
    "CubaLIF",
    "DelayedResetLIF",
    "GatedLIF",
    "IntegerLIF",
    "Izhikevich",
    "Learnable",
    "LearnableFraction",
    "LearnablePositive",
    "LearnableTimeConstant",
    "Neuron",
    "Recurrent",
    "RefractoryLIF",
    "SEAdLIF",
    "State",
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
    "from_nir",
    "fuse",
    "graph_step",
    "load",
    "memory",
    "models",
    "plots",
    "record",
    "report",
    "source",
    "spiking",
    "surrogate",
    "to_nir",
    "train",
]


def __getattr__(name: str) -> _Any:
    """Import what most programs do not need when it is first used."""
    if name in ("data", "models", "train"):
        return _import_module(f"spikefuse.{name}")
    if name == "convert":
        return _import_module("spikefuse.transforms.convert").convert
    if name == "from_nir":
        return _import_module("spikefuse.transforms.nir_read").from_nir
    if name == "to_nir":
        return _import_module("spikefuse.transforms.nir_write").to_nir
    if name == "plots":
        return _import_module("spikefuse.inspect.plots")
    if name == "load":
        return _import_module("spikefuse.train.predict").load
    raise AttributeError(f"module 'spikefuse' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
