"""Initial weights for a given firing rate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spikefuse.events.format import Events
from spikefuse.events.linear import EventLinear
from spikefuse.nn.call import inside
from spikefuse.nn.neuron import check_module

# Scales range from 2**-LARGEST to 2**LARGEST; each halving halves the range of the exponent.
LARGEST, HALVINGS = 8.0, 10


@torch.no_grad()
def scale_to_rate(net: nn.Module, x: Events | Tensor, rate: float) -> dict[str, float]:
    """Scale the weights of each layer, in place, so that its neurons fire at `rate` on `x`.

    Layers are scaled in order, each on the events of those before, by bisection. The scale depends
    on how the spikes of a dataset coincide in time, so no formula gives it.

    Args:
        net: a sequence of `EventLinear`, such as `spikefuse.models.event_mlp` returns; modules
            before and after them are ignored.
        x: `Events`, or dense spikes `[T, B, ...]`, 0 or 1.
        rate: share of the neurons that fire in a time step, in (0, 1).

    Returns:
        The final rate of each layer's neurons, by the name of the layer.

    Raises:
        ValueError: `rate` is out of range, or no scale brings a layer between half and twice the
            rate: its input is silent, or its bias alone makes neurons fire.
    """
    check_module("net", net)
    if not 0 < rate < 1:
        raise ValueError(f"rate is {rate}: expected a share in (0, 1)")
    events = Events.from_dense(x) if isinstance(x, Tensor) else x
    rates = {}
    with inside(None):  # layers called on their own take all time steps
        for name, layer in net.named_modules():
            if isinstance(layer, EventLinear) and layer.neuron is not None:
                events = _scale(name, layer, events, rate)
                rates[name] = events.rate
    return rates


def _scale(name: str, layer: EventLinear, inputs: Events, rate: float) -> Events:
    """Scale one layer and return its events."""
    layer.refuse_computed("scaled")
    original = layer.weight.clone()
    low, high = -LARGEST, LARGEST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        layer.weight.copy_(original * 2.0**middle)
        outputs = layer(inputs)
        assert isinstance(outputs, Events)
        if outputs.rate < rate:
            low = middle
        else:
            high = middle
    if not rate / 2 <= outputs.rate <= 2 * rate:
        layer.weight.copy_(original)
        raise ValueError(
            f"the neurons of {name or 'the layer'} fire at {outputs.rate:.3g} at any scale of the "
            f"weights: expected about {rate:g}; check the layer's input and bias"
        )
    return outputs
