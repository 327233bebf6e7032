"""Weights with which the layers on events begin at a sensible activity."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spikefuse.events.format import Events
from spikefuse.events.linear import EventLinear
from spikefuse.nn.neuron import calls

# Factors lie between 2**-LARGEST and 2**LARGEST; each trial halves the range of the exponent.
LARGEST, HALVINGS = 8.0, 10


@torch.no_grad()
def scale_to_rate(net: nn.Module, x: Events | Tensor, rate: float) -> dict[str, float]:
    """Scale the weights of each layer so that its neurons fire at `rate` on the input `x`.

    Layer after layer, each on the events of those before it, by bisection: activity grows with the
    scale of random weights. It is what the layers are initialised for, since of fixed formulas none
    knows how a data set's spikes fall together in time.

    Args:
        net: a sequence of `EventLinear`, such as `spikefuse.models.event_mlp` makes; other modules
            before and after them are left alone.
        x: `Events`, or dense spikes `[T, B, ...]`.
        rate: share of the neurons that fire in a step, in (0, 1).

    Returns:
        The rate of each layer's neurons then, by the layer's name.

    Raises:
        ValueError: `rate` is out of range, or a layer does not reach half of it, or stays above
            double, at any scale: its input is silent, or its bias alone makes neurons fire.
    """
    if not 0 < rate < 1:
        raise ValueError(f"rate is {rate}: expected a share in (0, 1)")
    events = Events.from_dense(x) if isinstance(x, Tensor) else x
    found = {}
    outer, calls.sequence = calls.sequence, None  # called on their own, layers take all steps
    try:
        for name, layer in net.named_modules():
            if isinstance(layer, EventLinear) and layer.neuron is not None:
                events = _scaled(name, layer, events, rate)
                found[name] = events.rate
    finally:
        calls.sequence = outer
    return found


def _scaled(name: str, layer: EventLinear, inputs: Events, rate: float) -> Events:
    """The events of the layer at the scale found."""
    original = layer.weight.clone()

    def at(exponent: float) -> Events:
        layer.weight.copy_(original * 2.0**exponent)
        outputs = layer(inputs)
        assert isinstance(outputs, Events)
        return outputs

    low, high = -LARGEST, LARGEST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        outputs = at(middle)
        if outputs.rate < rate:
            low = middle
        else:
            high = middle
    if not rate / 2 <= outputs.rate <= 2 * rate:
        layer.weight.copy_(original)
        raise ValueError(
            f"the neurons of {name or 'the layer'} fire at {outputs.rate:.3g} whatever the scale "
            f"of their weights, where {rate:g} was asked for: look at its input and its bias"
        )
    return outputs
