"""The network of a checkpoint that `spikefuse convert` has written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from spikefuse.neurons import RateIF
from spikefuse.nn import Temporal
from spikefuse.transforms.from_ann import from_ann


def spiking(net: nn.Module, shape: Sequence[int]) -> Temporal:
    """Return what `from_ann` makes of a network for inputs `[B, *shape]`, with thresholds and
    shifts that a state dict replaces."""
    return per_channel(from_ann(net, torch.zeros(2, *shape), 1, share=1.0))


def per_channel(net: Temporal) -> Temporal:
    """Give each neuron thresholds of the shape of its shifts, which `from_ann` corrects."""
    for neuron in net.modules():
        if isinstance(neuron, RateIF):
            neuron.shift = shift = torch.as_tensor(neuron.shift)
            neuron.threshold = torch.as_tensor(neuron.threshold).to(shift).expand_as(shift).clone()
    return net
