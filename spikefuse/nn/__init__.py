"""Modules for ordinary PyTorch networks."""

from spikefuse.block.block import Block
from spikefuse.events.format import Events
from spikefuse.events.linear import EventLinear
from spikefuse.events.rate import scale_to_rate
from spikefuse.events.stream import EventStream
from spikefuse.graph.fuse import fuse
from spikefuse.inspect.explain import explain
from spikefuse.inspect.record import record
from spikefuse.inspect.report import report
from spikefuse.inspect.source import source
from spikefuse.nn import encode, losses, metrics
from spikefuse.nn.checkpoint import checkpoint
from spikefuse.nn.feedback import Feedback
from spikefuse.nn.parameter_groups import parameter_groups
from spikefuse.nn.pool import MaxPool2d
from spikefuse.nn.recurrent import Recurrent
from spikefuse.nn.stream import Stream
from spikefuse.nn.temporal import Temporal
from spikefuse.transforms.export import exportable
from spikefuse.transforms.spiking import spiking

__all__ = [
    "Block",
    "EventLinear",
    "EventStream",
    "Events",
    "Feedback",
    "MaxPool2d",
    "Recurrent",
    "Stream",
    "Temporal",
    "checkpoint",
    "encode",
    "explain",
    "exportable",
    "fuse",
    "losses",
    "metrics",
    "parameter_groups",
    "record",
    "report",
    "scale_to_rate",
    "source",
    "spiking",
]
