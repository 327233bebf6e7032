"""From a neuron's step to the source of its kernels: trace, differentiate, simplify, emit."""

from spikefuse.compiler.ops import UnsupportedOperation

__all__ = ["UnsupportedOperation"]
