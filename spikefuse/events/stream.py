"""Event networks that run one time step at a time, for one sample."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spikefuse.events.autograd import kernels_of
from spikefuse.events.linear import EventLinear
from spikefuse.neurons.definition import States
from spikefuse.nn.neuron import backend_of, scan_neuron
from spikefuse.nn.stream import Stream
from spikefuse.nn.temporal import Temporal
from spikefuse.scan.records import Arguments, Wanted


class EventStream(Stream):
    """Run a sequence of `EventLinear` one time step at a time, for one sample.

    It is a `Stream` whose layers exchange lists of spikes. The result equals that of
    `Temporal(net)` with a batch of one, without gradients, and the states are `[1, out_features]`.
    On a GPU, kernels read event lists and their lengths from device memory: a step never
    synchronizes, and can be captured in a CUDA graph. All spikes are used, whatever the capacity.

    Args:
        net: `EventLinear` layers in sequence, or a `Temporal` of them.

    Call: `y = stream(x)`

    Args:
        x: spikes `[in_features]`, 0 or 1, float32. The values are checked on a CPU only, as a check
            on a GPU would wait for it.

    Returns:
        The spikes or currents `[out_features]` of the last layer.

    Raises:
        TypeError, ValueError: a layer or an input is not as described.
    """

    def __init__(self, net: nn.Sequential | Temporal) -> None:
        super().__init__(net)
        layers: dict[str, EventLinear] = {}
        for name, layer in self.net.named_children():
            if not isinstance(layer, EventLinear):
                raise TypeError(f"layer {name} is a {type(layer).__name__}: expected EventLinear")
            if layers and next(reversed(layers.values())).neuron is None:
                raise TypeError(f"layer {name} needs spikes, but the layer before has no neuron")
            layers[name] = layer
        self._layers = layers

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        inputs = next(iter(self._layers.values())).in_features
        if list(x.shape) != [inputs] or x.dtype != torch.float32:
            raise ValueError(
                f"the spikes are {x.dtype} of shape {list(x.shape)}: expected float32 [{inputs}]"
            )
        if x.device.type == "cpu" and not ((x == 0) | (x == 1)).all():
            raise ValueError("spikes have values other than 0 and 1: expected a binary tensor")
        backend = backend_of((x,), "auto")
        kernels, y = kernels_of(backend), x
        final: dict[str, States] = {}
        for name, layer in self._layers.items():
            weight, spikes = layer.kernel_weight().t(), kernels.list_spikes(y)
            y = kernels.listed_currents(weight, layer.bias, *spikes)
            if layer.neuron is not None:
                key = f"net.{name}.neuron"
                state = None if self.state is None else self.state[key]
                arguments = Arguments((y.view(1, 1, -1),), state)
                results = scan_neuron(layer.neuron, arguments, Wanted(True, impl=backend))
                final[key] = tuple(results.finals)
                y = results.outputs[0].view(-1)
        self._state = final
        return y
