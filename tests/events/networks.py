"""Networks of ordinary layers for comparison with `EventLinear`, and gradients of both."""

from __future__ import annotations

import torch
from torch import nn

import spikefuse as sf
from spikefuse.nn import EventLinear


def dense(net: sf.Temporal) -> sf.Temporal:
    """Return the same network of ordinary layers."""
    layers = []
    for layer in net.net:
        linear = nn.Linear(layer.in_features, layer.out_features)
        linear.load_state_dict({"weight": layer.weight, "bias": layer.bias})
        layers += [linear] if layer.neuron is None else [linear, layer.neuron]
    return sf.Temporal(nn.Sequential(*layers))


def gradients(net: sf.Temporal, y: torch.Tensor) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    y.backward(torch.randn(y.shape, generator=generator))
    found = []
    for layer in net.net:
        if isinstance(layer, nn.Linear | EventLinear):
            found += [layer.weight.grad, layer.bias.grad]
    return found
