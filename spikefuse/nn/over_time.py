"""Layers of a network that see all time steps at once, and the parallel neurons among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spikefuse.neurons.checks import check_tensor, integer
from spikefuse.neurons.definition import Neuron, SpikingLayer
from spikefuse.neurons.surrogate import Surrogate, checked
from spikefuse.nn.call import TemporalCall, active
from spikefuse.nn.checkpoint import refuse_recomputation
from spikefuse.nn.symbolic import leaf
from spikefuse.scan.layout import flatten_steps, unflatten_steps


class OnSequences(nn.Module):
    """Base of layers that get whole sequences, also inside `Temporal`.

    Attributes:
        history: how many steps of its only input before a step a causal layer needs. Before the
            first step they are 0; `Temporal` and `Stream` carry them as its state, `[B, history,
            ...]`. None for layers that need the whole sequence in one call.
    """

    history: int | None = None

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the states, tensors `[B, ...]`; none for a layer that carries no state."""
        return () if self.history is None else ("history",)

    def over_time(self, *inputs: Tensor) -> Any:
        """Return the result `[T, B, ...]`, or a tuple, for inputs `[T, B, ...]`, which begin with
        the steps of the history, `[history + T, B, ...]`, if there is one."""
        raise NotImplementedError

    @leaf
    def forward(self, *inputs: Tensor) -> Any:
        call = active.call
        refuse_recomputation(self)
        self._check(inputs)
        if call is None:
            return self._over_time(inputs, None)
        if call.passing is not None:
            raise ValueError(
                f"{type(self).__name__} needs all time steps in one process: use data parallelism"
            )
        if call.has_states and not self.state_names:
            raise ValueError(
                f"{type(self).__name__} needs the whole sequence in one call, without state= and "
                "return_state=True, and outside of Stream"
            )
        y = self._over_time([unflatten_steps(x, call.num_steps) for x in inputs], call)
        return tuple(map(flatten_steps, y)) if isinstance(y, tuple) else flatten_steps(y)

    def _over_time(self, inputs: Sequence[Tensor], call: TemporalCall | None) -> Any:
        """Return the result for inputs `[T, B, ...]`, with states from `call` and to it."""
        steps = inputs[0].shape[:2]
        if self.history is not None:
            if len(inputs) > 1:
                raise TypeError(f"{type(self).__name__} with a history takes one input")
            inputs = [self._after_history(inputs[0], self.history, call)]
        return self._checked(self.over_time(*inputs), steps)

    def _check(self, inputs: Sequence[Tensor]) -> None:
        """Raise an error for inputs that are no sequences."""
        name = type(self).__name__
        for x in inputs:
            check_tensor(f"{name}: x", x, " [T, B, ...]")
            if active.call is None and (x.ndim < 2 or x.shape[0] == 0):
                raise ValueError(
                    f"{name}: x has shape {list(x.shape)}: expected [T, B, ...] with T >= 1"
                )

    def _after_history(self, x: Tensor, history: int, call: TemporalCall | None) -> Tensor:
        """The input after the steps before it; the last ones become the final state."""
        if call is None or not call.has_states:
            return torch.cat([x.new_zeros(history, *x.shape[1:]), x])
        name, shape = call.name_of(self), (x.shape[1], history, *x.shape[2:])
        (past,) = (call.initial or {}).get(name) or (x.new_zeros(shape),)
        if past.shape != shape:
            raise ValueError(f"the state of '{name}' is {list(past.shape)}: expected {list(shape)}")
        x = torch.cat([past.transpose(0, 1), x])
        call.finals[name] = (x[len(x) - history :].transpose(0, 1).clone(),)
        return x

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
    """A part of a network that sees several time steps: attention or a convolution over time, a
    norm with statistics of its own in each step, a mean of the steps so far.

    Example::

        class Smoothed(nn.Module):
            def forward(self, x):               # [T, B, ...], to the same T and B
                return x.cumsum(0) / torch.arange(1, len(x) + 1).view(-1, 1, 1)

        net = sf.Temporal(nn.Sequential(nn.Linear(8, 16), sf.LIF(), sf.OverTime(Smoothed())))
        y = net(torch.rand(10, 4, 8))

        difference = sf.OverTime(lambda x: x[1:] - x[:-1], history=1)  # also one step at a time

    Args:
        body: a module or a function from tensors `[T, B, ...]` to a tensor `[T, B, ...]`. It
            contains no neurons and no other layers over time, which belong before or after it. It
            may return a tuple of tensors.
        history: of a causal body, how many steps before a step its result depends on. It then gets
            one input, `[history + T, B, ...]`, which begins with those steps, and returns the last
            T. They are 0 before the first step, and `Temporal` and `Stream` carry them as a state
            of shape `[B, history, ...]`. None for a body that needs the whole sequence.

    Call: `y = over_time(*inputs)`

    Args:
        inputs: `[T, B, ...]`, inside `Temporal` `[T*B, ...]` each, of any shape of a step.

    Returns:
        The result of `body`, `[T, B, ...]`, inside `Temporal` `[T*B, ...]`.

    Raises:
        TypeError: `body` cannot be called, or returns something else than a tensor.
        ValueError: `body` contains such a layer, or returns another number of steps; without a
            `history`, the network gets the sequence in parts (`Stream`, `state=`,
            `return_state=True`); the time of the network is shared.
    """

    def __init__(self, body: Callable[..., Tensor], history: int | None = None) -> None:
        super().__init__()
        if not callable(body) or isinstance(body, type):
            raise TypeError(f"body is {body!r}: expected a module or a function")
        inside = body.modules() if isinstance(body, nn.Module) else ()
        if any(isinstance(m, Neuron | OnSequences) for m in inside):
            raise ValueError(
                "body contains a neuron, or a layer over time: let it follow OverTime, inside "
                "Temporal"
            )
        self.body, self.history = body, None if history is None else integer("history", history, 0)

    def over_time(self, *inputs: Tensor) -> Tensor:
        return self.body(*inputs)


class StepScale(OnSequences):
    """Multiply each time step by a scale of its own, which is learned.

    Equation: `y[t] = scale[t] x[t]`.

    After a batch norm, whose statistics run over T and B inside `Temporal`, it is the temporal
    effective batch normalization (TEBN), which `sf.fuse` computes together with the neuron.
    `sf.convert` takes that of SpikingJelly.

    Shapes: `x`, `y`: `[T, B, ...]`, with T = `num_steps`, inside `Temporal` `[T*B, ...]`, of any
    dtype of floating point; `scale`, a parameter: `[T]`, ones at first.

    Example::

        layers = nn.Sequential(
            nn.Conv2d(2, 16, 3, bias=False), nn.BatchNorm2d(16), sf.StepScale(4), sf.LIF())
        spikes = sf.Temporal(layers)(torch.rand(4, 8, 2, 10, 10))

    Args:
        num_steps: T.

    Raises:
        ValueError: `num_steps` is below 1; at a call, the input has another number of steps, or
            the network gets the sequence in parts.

    Source: Duan et al., "Temporal Effective Batch Normalization in Spiking Neural Networks",
    NeurIPS 2022.
    """

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(integer("num_steps", num_steps)))

    def over_time(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if len(x) != len(self.scale):
            raise ValueError(
                f"{type(self).__name__} received {len(x)} time steps: expected {len(self.scale)}"
            )
        return x * self.scale.to(x.dtype).view(-1, *(1,) * (x.ndim - 1))


class PSN(SpikingLayer, OnSequences):
    """Parallel spiking neuron: the potential of each step is a learned sum over all steps.

    Equation, with the weight `W` `[T, T]` and the bias `b` `[T, 1]`, both learned::

        h[t] = sum_j W[t, j] x[j] + b[t]
        s[t] = 1 if h[t] >= 0 else 0

    There is no reset, and steps may see later ones. It runs as one matrix product.

    Shapes: `x`, spikes: `[T, B, ...]`, with T = `num_steps`; inside `Temporal` `[T*B, ...]`.

    Source: Fang et al., "Parallel Spiking Neurons with High Efficiency and Ability to Learn
    Long-term Dependencies", NeurIPS 2023. Weights begin as those of `nn.Linear`, biases at -1.

    Example::

        layers = nn.Sequential(nn.Linear(784, 128), sf.PSN(num_steps=8), nn.Linear(128, 10))
        logits = sf.Temporal(layers)(torch.rand(8, 32, 784)).mean(0)  # [32, 10]

    Args:
        num_steps: T.
        order: of a masked PSN: how many steps, this one and those before it, a step sees; None for
            all steps, also later ones.
        surrogate: replaces the derivative of the spike; `Sigmoid(4.0)` by default.

    Raises:
        TypeError, ValueError: an argument is not as described; at a call, the input has another
            number of steps.
    """

    def __init__(
        self, num_steps: int, order: int | None = None, surrogate: Surrogate | None = None
    ) -> None:
        super().__init__()
        num_steps = integer("num_steps", num_steps)
        if order is not None and integer("order", order) > num_steps:
            raise ValueError(f"order is {order}: expected at most num_steps = {num_steps}")
        self.num_steps, self.order = num_steps, order
        self.weight = nn.Parameter(torch.empty(num_steps, num_steps))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        self.bias = nn.Parameter(torch.full((num_steps, 1), -1.0))
        self.surrogate = checked("surrogate", surrogate)

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
