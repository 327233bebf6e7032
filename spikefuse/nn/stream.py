"""Networks that run one time step at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spikefuse._torch import Modules
from spikefuse.kernels.norm import BatchNorm
from spikefuse.neurons.checks import check_tensor
from spikefuse.neurons.definition import States
from spikefuse.nn.call import TemporalCall, inside
from spikefuse.nn.neuron import check_module
from spikefuse.nn.reading import missing_dims
from spikefuse.nn.temporal import (
    LAYERS,
    Temporal,
    check_state,
    layers_with_states,
    run_captured,
)


class Stream:
    """Run a network one time step at a time, without gradients, and hold the states in between.

    `stream(x[0])`, `stream(x[1])`, ... give the steps of `Temporal(net)(x)`, up to the rounding of
    layers that see another batch. Steps may be of any number of samples, but of the same one until
    `reset`. A step that raises an error leaves the state as it was.

    A CUDA graph of a step reads the tensors that `state` held when it was recorded, and leaves the
    states after the step in those that `state` held then: copy them back after each replay.

    Example::

        net = nn.Sequential(nn.Linear(784, 128), sf.LIF(), nn.Linear(128, 10))
        stream = sf.Stream(net.eval())
        for x in torch.rand(8, 1, 784):
            y = stream(x)  # [1, 10]
        stream.reset()  # before another sequence

    Args:
        net: a network for one time step, or the `Temporal` of one; it may be fused. The stream
            calls it as it is: its device, dtype and mode remain the caller's.

    Call: `y = stream(*inputs, **kwargs)`

    Args:
        inputs, kwargs: the arguments of the network for one step, tensors `[B, ...]`.

    Returns:
        What the network returns for this step, `[B, ...]`.

    Raises:
        TypeError, ValueError: a batch norm is in training mode or has no running statistics, so
            that it would normalize by a single step; a layer of `torch.nn` has a memory of its own
            (see `Temporal`); or an input does not fit the state.
    """

    def __init__(self, net: nn.Module) -> None:
        check_module("net", net)
        #: Runs the network as a fused graph, see `Temporal`.
        self.captured: Callable[..., Any] | None = None
        if isinstance(net, Temporal):
            if net.passing is not None:
                raise ValueError("the time of the network is sharded: stream a copy that is not")
            self.captured, net = net.captured, net.net
        if any(isinstance(m, Temporal) for m in net.modules()):
            raise ValueError("net contains a Temporal: stream the Temporal, or the network in it")
        self.net = net
        self._state: dict[str, States] | None = None
        self._listed = Modules((*LAYERS, BatchNorm), "net")

    @property
    def state(self) -> dict[str, States] | None:
        """The states after the last step, a dict from each layer's name to its tuple of states;
        None at rest. It has the form of `Temporal`'s, with names such as "net.1", and can be
        exchanged with it.

        A step does not change the tensors of the state before it.
        """
        return self._state

    @state.setter
    def state(self, state: dict[str, States] | None) -> None:
        if state is not None:
            check_state(state, layers_with_states(self.net))
        self._state = state

    def reset(self) -> None:
        """Begin a new sequence: the next step starts from rest."""
        self._state = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.net})"

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        modules, listed = self._listed.of(self.net)
        layers = layers_with_states(self.net, one_step=True, listed=listed)
        names = dict(zip(map(id, layers.values()), layers, strict=True))
        x = inputs[0] if inputs else None
        if isinstance(x, Tensor) and x.is_nested:
            check_tensor("the input", x, " [B, ...]")
        batch = len(x) if isinstance(x, Tensor) and x.ndim else 1
        call = TemporalCall(1, names, batch, initial=self._state, final=True)
        call.modules = modules
        try:
            with inside(call), torch.no_grad():
                y = run_captured(self.captured, run_step, self.net, inputs, kwargs)
        except Exception as error:
            is_misread = isinstance(x, Tensor) and missing_dims(self.net, x) is not None
            if is_misread or self._state is not None:
                note = "a stream reads its inputs as one time step [B, ...], without T"
                if self._state is not None:
                    note += "; call reset() before another sequence"
                error.add_note(note)
            raise
        # A network need not call all of its layers at each step.
        self._state = {**dict.fromkeys(layers, ()), **(self._state or {}), **call.finals}
        return y


def run_step(net: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call `net`, written for one time step, on one step."""
    return net(*args, **kwargs)
