"""Modules for ordinary PyTorch networks."""

from spikefuse.block.block import Block
from spikefuse.events.format import Events
from spikefuse.events.linear import EventLinear
from spikefuse.events.rate import scale_to_rate
from spikefuse.events.stream import EventStream
from spikefuse.inspect.explain import explain
from spikefuse.inspect.record import record
from spikefuse.inspect.report import report
from spikefuse.inspect.source import source
from spikefuse.nn import encode, losses, metrics
from spikefuse.nn.checkpoint import checkpoint
from spikefuse.nn.feedback import Feedback
from spikefuse.nn.neuron import Neuron
from spikefuse.nn.pool import MaxPool2d
from spikefuse.nn.recurrent import Recurrent
from spikefuse.nn.stream import Stream
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
    AdLIF,
    AlphaLIF,
    CubaLIF,
    DelayedResetLIF,
    GatedLIF,
    IntegerLIF,
    Izhikevich,
    RefractoryLIF,
    SEAdLIF,
    TernaryLIF,
    TwoCompartmentLIF,
)
from spikefuse.transforms.export import exportable
from spikefuse.transforms.fuse import fuse
from spikefuse.transforms.spiking import spiking

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
    "Block",
    "CubaLIF",
    "DelayedResetLIF",
    "EventLinear",
    "EventStream",
    "Events",
    "Feedback",
    "GatedLIF",
    "IntegerLIF",
    "Izhikevich",
    "MaxPool2d",
    "Neuron",
    "Recurrent",
    "RefractoryLIF",
    "SEAdLIF",
    "Stream",
    "Temporal",
    "TernaryLIF",
    "TwoCompartmentLIF",
    "checkpoint",
    "encode",
    "explain",
    "exportable",
    "fuse",
    "losses",
    "metrics",
    "record",
    "report",
    "scale_to_rate",
    "source",
    "spiking",
]
