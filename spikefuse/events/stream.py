"""Event networks that run one time step at a time, for one sample."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spikefuse.events.autograd import kernels_of
from spikefuse.events.linear import EventLinear
from spikefuse.neurons.definition import States
from spikefuse.nn.neuron import backend_of
from spikefuse.scan.op import Request

# The states `[1, out_features]` of each layer with neurons.
StreamState = tuple[States, ...]


class EventStream(nn.Module):
    """Run a sequence of `EventLinear` one time step at a time, for one sample.

    The result is that of `Temporal(net)` with a batch of one, without gradients. On a GPU, event
    lists and their lengths stay there and are read by the kernels: a step never synchronizes, and
    can be captured in a CUDA graph. All spikes are used, whatever the capacity.

    Call: `y, state = stream(x, state)`

    Args:
        x: spikes `[in_features]`, 0 or 1, float32.
        state: from the previous call, or None to start from rest.

    Returns:
        The spikes or currents `[out_features]` of the last layer, float32, and the state: for each
        layer with neurons, the tuple of its states, float32 `[1, out_features]`.

    Raises:
        TypeError, ValueError: a layer or an input is not as described.
    """

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        layers: list[EventLinear] = []
        for name, layer in net.named_children():
            if not isinstance(layer, EventLinear):
                raise TypeError(f"layer {name} is a {type(layer).__name__}: expected EventLinear")
            if layers and layers[-1].neuron is None:
                raise TypeError(f"layer {name} needs spikes, but the layer before has no neuron")
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
            raise ValueError(
                f"the state has {len(state)} entries: expected {number}, one per layer with neurons"
            )
        backend = backend_of((x,), "auto")
        kernels, y, states = kernels_of(backend), x, iter(state or ())
        final: list[States] = []
        for layer in self._layers:
            y = kernels.listed_currents(layer.weight.t(), layer.bias, *kernels.list_spikes(y))
            if layer.neuron is not None:
                request = Request((y.view(1, 1, -1),), next(states, None), backend, final=True)
                (spikes,), after = layer.neuron._scan(request)
                final.append(after)
                y = spikes.view(-1)
        return y, tuple(final)
