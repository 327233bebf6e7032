"""Turn a neuron's step into kernel source: trace, differentiate, simplify, emit."""

from spikefuse.compiler.ops import UnsupportedOperation

__all__ = ["UnsupportedOperation"]
