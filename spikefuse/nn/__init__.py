"""Modules for ordinary PyTorch networks."""

from spikefuse.kernels.events import Events
from spikefuse.nn.block import Block
from spikefuse.nn.convert import spiking
from spikefuse.nn.event import EventLinear
from spikefuse.nn.event_rate import scale_to_rate
from spikefuse.nn.event_stream import EventStream
from spikefuse.nn.explain import explain
from spikefuse.nn.fuse import fuse
from spikefuse.nn.neuron import Neuron
from spikefuse.nn.pool import MaxPool2d
from spikefuse.nn.row_adam import RowAdam
from spikefuse.nn.temporal import Temporal
from spikefuse.nn.zoo import (
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
    RefractoryLIF,
    TernaryLIF,
    TwoCompartmentLIF,
)

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
    "Block",
    "CubaLIF",
    "EventLinear",
    "EventStream",
    "Events",
    "GatedLIF",
    "IntegerLIF",
    "Izhikevich",
    "MaxPool2d",
    "Neuron",
    "RefractoryLIF",
    "RowAdam",
    "Temporal",
    "TernaryLIF",
    "TwoCompartmentLIF",
    "explain",
    "fuse",
    "scale_to_rate",
    "spiking",
]
