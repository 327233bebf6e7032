"""A network on events, one time step after another, for one sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spikefuse.events.linear import EventLinear
from spikefuse.neurons.definition import States
from spikefuse.nn.neuron import backend_of
from spikefuse.scan.op import Request

# Of each layer with neurons their states, `[1, out_features]` each.
StreamState = tuple[States, ...]


class EventStream(nn.Module):
    """A sequence of `EventLinear` that takes its input step by step, for one sample.

    It computes what `Temporal(net)` does for a batch of one, without gradients. On a GPU the lists
    of events and their lengths stay there, and kernels read them when they run: a step waits for
    nothing, and may be captured in a CUDA graph. Every spike is used, whatever the capacity.

    Call: `y, state = stream(x, state)`

    Args:
        x: spikes `[in_features]`, 0 or 1, float32.
        state: what the call before gave, or None to start from rest.

    Returns:
        The spikes or currents `[out_features]` of the last layer, and the state.

    Raises:
        TypeError, ValueError: a layer, or an input, is not as described.
    """

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        layers: list[EventLinear] = []
        for name, layer in net.named_children():
            if not isinstance(layer, EventLinear):
                raise TypeError(f"layer {name} is a {type(layer).__name__}: expected EventLinear")
            if layers and layers[-1].neuron is None:
                raise TypeError(f"layer {name} takes spikes, but the one before has no neuron")
            layers.append(layer)
        self.net, self._layers = net, layers

    @torch.no_grad()
    def forward(self, x: Tensor, state: StreamState | None = None) -> tuple[Tensor, StreamState]:
        inputs = self._layers[0].in_features
        if list(x.shape) != [inputs] or x.dtype != torch.float32:
            raise ValueError(
                f"the spikes are {x.dtype} of shape {list(x.shape)}: expected float32 [{inputs}]"
            )
        number = sum(layer.neuron is not None for layer in self._layers)
        if state is not None and len(state) != number:
            raise ValueError(f"the state has {len(state)} parts: expected {number}, one a layer")
        kernels, y, after = _kernels(x), x, []
        for i, layer in enumerate(self._layers):
            y = kernels.row_sum(layer.weight, layer.bias, *kernels.row_listed(y))
            if layer.neuron is not None:
                currents = (y.view(1, 1, -1),)
                before = None if state is None else state[i]
                backend = backend_of(currents, "auto")
                (spikes,), final = layer.neuron._scan(Request(currents, before, backend, True))
                after.append(final)
                y = spikes.view(-1)
        return y, tuple(after)


def _kernels(x: Tensor) -> Any:
    if x.is_cpu:
        from spikefuse.events import products_numba as event_numba

        return event_numba
    from spikefuse.events import products_triton as event_triton

    return event_triton
