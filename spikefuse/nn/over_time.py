"""Layers of a network that see all time steps at once, and the parallel neurons among them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from spikefuse.neurons.definition import Neuron
from spikefuse.neurons.surrogate import Sigmoid, Surrogate
from spikefuse.nn.call import active
from spikefuse.scan.layout import flatten_steps, unflatten_steps


class OnSequences(nn.Module):
    """Base of layers that get whole sequences, also inside `Temporal`."""

    def over_time(self, *inputs: Tensor) -> Any:
        """Return the result `[T, B, ...]`, or a tuple, for inputs `[T, B, ...]`."""
        raise NotImplementedError

    def forward(self, *inputs: Tensor) -> Any:
        call = active.call
        if call is None:
            return self._checked(self.over_time(*inputs), inputs[0].shape[:2])
        if call.has_states or call.passing is not None:
            raise ValueError(
                f"{type(self).__name__} needs the whole sequence in one call, without state= and "
                "return_state=True, outside of Stream, and with time that is not shared"
            )
        sequences = [unflatten_steps(x, call.num_steps) for x in inputs]
        y = self._checked(self.over_time(*sequences), sequences[0].shape[:2])
        return tuple(map(flatten_steps, y)) if isinstance(y, tuple) else flatten_steps(y)

    def _checked(self, y: Any, steps: torch.Size) -> Any:
        if isinstance(y, tuple) and y:
            return tuple(self._checked(part, steps) for part in y)
        if not isinstance(y, Tensor):
            raise TypeError(
                f"{type(self).__name__} got a {type(y).__name__} from its body: expected a tensor"
            )
        if y.shape[:2] != steps:
            raise ValueError(
                f"{type(self).__name__} got {list(y.shape)} from its body: expected T, B = "
                f"{list(steps)} first"
            )
        return y


class OverTime(OnSequences):
    """A part of a network that sees all time steps: attention or a convolution over time, a norm
    with statistics of its own in each step, a mean of the steps so far.

    Example::

        class Smoothed(nn.Module):
            def forward(self, x):               # [T, B, ...], to the same T and B
                return x.cumsum(0) / torch.arange(1, len(x) + 1).view(-1, 1, 1)

        net = sf.Temporal(nn.Sequential(nn.Linear(8, 16), sf.LIF(), sf.OverTime(Smoothed())))
        y = net(torch.rand(10, 4, 8))

    Args:
        body: a module or a function from tensors `[T, B, ...]` to a tensor `[T, B, ...]`. It
            contains no neurons, which belong before or after it. It may return a tuple of tensors.

    Call: `y = over_time(*inputs)`

    Args:
        inputs: `[T, B, ...]`, inside `Temporal` `[T*B, ...]` each, of any shape of a step.

    Returns:
        The result of `body`, `[T, B, ...]`, inside `Temporal` `[T*B, ...]`.

    Raises:
        TypeError: `body` cannot be called, or returns something else than a tensor.
        ValueError: `body` contains a neuron, or returns another number of steps; the network gets
            the sequence in parts (`Stream`, `state=`, `return_state=True`, shared time).
    """

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        if not callable(body) or isinstance(body, type):
            raise TypeError(f"body is {body!r}: expected a module or a function")
        if isinstance(body, nn.Module) and any(isinstance(m, Neuron) for m in body.modules()):
            raise ValueError("body contains a neuron: let it follow OverTime, inside Temporal")
        self.body = body

    def over_time(self, *inputs: Tensor) -> Tensor:
        return self.body(*inputs)


class PSN(OnSequences):
    """Parallel spiking neuron: the potential of each step is a learned sum over all steps.

    Equation, with the weight `W` `[T, T]` and the bias `b` `[T, 1]`, both learned::

        h[t] = sum_j W[t, j] x[j] + b[t]
        s[t] = 1 if h[t] >= 0 else 0

    There is no reset, and steps may see later ones. It runs as one matrix product.

    Shapes: `x`, spikes: `[T, B, ...]`, with T = `num_steps`; inside `Temporal` `[T*B, ...]`.

    Source: Fang et al., "Parallel Spiking Neurons with High Efficiency and Ability to Learn
    Long-term Dependencies", NeurIPS 2023. Weights begin as those of `nn.Linear`, biases at -1.

    Args:
        num_steps: T.
        order: of a masked PSN: how many steps, this one and those before it, a step sees; None for
            all steps, also later ones.
        surrogate: replaces the derivative of the spike; `Sigmoid(4.0)` by default.

    Raises:
        ValueError: an argument is out of range; at a call, the input has another number of steps.
    """

    def __init__(
        self, num_steps: int, order: int | None = None, surrogate: Surrogate | None = None
    ) -> None:
        super().__init__()
        if num_steps < 1 or (order is not None and not 1 <= order <= num_steps):
            raise ValueError(
                f"num_steps, order are {num_steps}, {order}: expected at least 1, and an order "
                "from 1 to num_steps"
            )
        self.num_steps, self.order = num_steps, order
        self.weight = nn.Parameter(torch.empty(num_steps, num_steps))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        self.bias = nn.Parameter(torch.full((num_steps, 1), -1.0))
        self.surrogate = Sigmoid() if surrogate is None else surrogate

    def extra_repr(self) -> str:
        return f"{self.num_steps}, order={self.order}"

    def matrix(self) -> Tensor:
        """Return `W`, with zeros for the steps that a step does not see."""
        if self.order is None:
            return self.weight
        return self.weight.tril().triu(1 - self.order)

    def over_time(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if len(x) != self.num_steps:
            raise ValueError(f"PSN received {len(x)} time steps: expected {self.num_steps}")
        h = torch.addmm(self.bias.to(x.dtype), self.matrix().to(x.dtype), x.flatten(1))
        spikes: Tensor = self.surrogate(h)
        return spikes.view(x.shape)
