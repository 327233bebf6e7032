"""Sliding parallel spiking neuron."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spikefuse.neurons.checks import integer
from spikefuse.neurons.definition import Neuron, State, States
from spikefuse.neurons.surrogate import Surrogate, checked


class SlidingPSN(Neuron):
    """Sliding parallel spiking neuron: a learned sum over the last steps of the input.

    Equation, per time step, with the input `x` of this step, those before it, and the learned
    weights `w0`, `w1`, ... and `bias`::

        h = w0 * x[t] + w1 * x[t - 1] + ... + bias
        s = 1 if h >= 0 else 0

    There is no reset. The inputs before the first step are 0. The states are the last inputs, so
    that sequences may have any length, and `Stream` runs it.

    Shapes: `x`, spikes: `[T, B, ...]` (float32, bfloat16 or float16); states: `[B, ...]` (float32).

    Source: Fang et al., "Parallel Spiking Neurons with High Efficiency and Ability to Learn
    Long-term Dependencies", NeurIPS 2023. Weights begin at 1, 1/2, 1/4, ..., the bias at -1.

    Example::

        neuron = sf.SlidingPSN(order=4)  # sees this step and the three before it
        spikes = neuron(torch.rand(100, 32, 128))

    Args:
        order: number of steps that are seen, at least 1.
        surrogate: replaces the derivative of the spike; `Sigmoid(4.0)` by default.

    Raises:
        ValueError: `order` is out of range.
    """

    #: The number of steps that are seen, which the classes of instances have.
    order: ClassVar[int | None] = None

    def __new__(cls, order: int = 4, *args: Any, **kwargs: Any) -> SlidingPSN:
        if cls.order is None:  # else the class of another instance, of which this is a copy
            cls = _of_order(cls, integer("order", order))
        made: SlidingPSN = object.__new__(cls)
        return made

    def __init__(self, order: int = 4, surrogate: Surrogate | None = None) -> None:
        super().__init__()
        for i in range(order):
            self.register_parameter(f"w{i}", nn.Parameter(torch.tensor(0.5**i)))
        self.bias = nn.Parameter(torch.tensor(-1.0))
        self.surrogate = self._option("surrogate", surrogate, checked)

    def step(self, x: Tensor, *states: Tensor) -> tuple[Tensor, States]:
        h: Tensor = self.bias
        for i, past in enumerate((x, *states)):
            h = h + getattr(self, f"w{i}") * past
        self.expose(h=h)
        return self.surrogate(h), (x, *states)[: len(states)]

    def __reduce__(self) -> Any:
        return SlidingPSN, (self.order,), self.__getstate__()


@cache
def _of_order(cls: type[SlidingPSN], order: int) -> type[SlidingPSN]:
    """The class with a state for each input before the last one."""
    states = {f"x{i}": State() for i in range(1, order)}
    made: Any = type(cls)
    found: type[SlidingPSN] = made(
        cls.__name__, (cls,), {"__doc__": cls.__doc__, "order": order, **states}
    )
    return found
