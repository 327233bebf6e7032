"""One compiler for all neuron models: trace, differentiate, emit, launch."""

from spikefuse.compiler.launch import scan
from spikefuse.compiler.ops import UnsupportedOperation
from spikefuse.compiler.relayed import Relay

__all__ = ["Relay", "UnsupportedOperation", "scan"]
