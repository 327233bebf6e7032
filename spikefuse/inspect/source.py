"""The source of a neuron's kernels."""

from __future__ import annotations

from typing import Any

from spikefuse.neurons.definition import Neuron
from spikefuse.scan.kinds import kinds_of
from spikefuse.scan.program import prepare

BACKENDS = ("numba", "triton")


def source(neuron: Neuron, backend: str = "numba") -> str:
    """Return the source of the kernels that are compiled from a neuron's step.

    It is a Python module with a kernel `forward` and a kernel `backward`, which gives the gradients
    of all inputs and of all parameters that may be learned. A call loads the same kernels, except
    that its `backward` leaves out gradients that nobody asks for; on a CPU, each has a module of
    its own. Nothing is compiled here, and neither a GPU nor Triton is needed.

    Example::

        print(sf.source(sf.LIF()))
        print(sf.source(sf.LIF(), "triton"))

    Args:
        neuron: a neuron, such as `sf.LIF()` or one of your own. Kernels take its floats and
            tensors as arguments; anything else is a constant in the source.
        backend: "numba", for CPUs, or "triton", for GPUs.

    Returns:
        The text of the module.

    Raises:
        TypeError: `neuron` is not a neuron.
        ValueError: another backend.
        UnsupportedOperation: `step` uses an operation that cannot be compiled.
    """
    checked: Any = neuron
    if not isinstance(checked, Neuron):
        raise TypeError(
            f"neuron is a {type(checked).__name__}: expected one such as sf.LIF(), or a neuron of "
            "a network, such as net.net[2]"
        )
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}: expected one of {', '.join(BACKENDS)}")
    description = neuron.description()
    kinds = kinds_of(description.values(neuron))
    made = prepare(neuron, backend, (*description.statics, ()), kinds, description.cache)
    return made.source(made.step.inputs, made.learnable())
