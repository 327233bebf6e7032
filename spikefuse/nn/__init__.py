"""Modules for ordinary PyTorch networks."""

from spikefuse.block.block import Block
from spikefuse.events.format import Events
from spikefuse.events.linear import EventLinear
from spikefuse.events.rate import scale_to_rate
from spikefuse.events.stream import EventStream
from spikefuse.graph.fuse import fuse
from spikefuse.nn import encode, losses, metrics, readouts
from spikefuse.nn.activations import QCFS
from spikefuse.nn.checkpoint import checkpoint
from spikefuse.nn.delay import Delay, DelayedLinear
from spikefuse.nn.feedback import Feedback
from spikefuse.nn.loop import Loop
from spikefuse.nn.online import Online
from spikefuse.nn.over_time import PSN, OverTime, StepScale
from spikefuse.nn.parameter_groups import parameter_groups
from spikefuse.nn.pool import MaxPool2d
from spikefuse.nn.recurrent import Recurrent
from spikefuse.nn.stream import Stream
from spikefuse.nn.temporal import Temporal

__all__ = [
    "PSN",
    "QCFS",
    "Block",
    "Delay",
    "DelayedLinear",
    "EventLinear",
    "EventStream",
    "Events",
    "Feedback",
    "Loop",
    "MaxPool2d",
    "Online",
    "OverTime",
    "Recurrent",
    "StepScale",
    "Stream",
    "Temporal",
    "checkpoint",
    "encode",
    "fuse",
    "losses",
    "metrics",
    "parameter_groups",
    "readouts",
    "scale_to_rate",
]
