"""The network of a checkpoint that `spikefuse convert` has written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from spikefuse.neurons import RateIF
from spikefuse.nn import Temporal
from spikefuse.transforms.from_ann import from_ann


def spiking(net: nn.Module, shape: Sequence[int]) -> Temporal:
    """Return what `from_ann` makes of a network for inputs `[B, *shape]`, with thresholds and
    shifts that a state dict replaces."""
    result = from_ann(net, torch.zeros(2, *shape), 1, share=1.0)
    for neuron in rate_neurons(result):
        # As `from_ann` corrects them: one for each channel.
        neuron.shift = torch.zeros_like(torch.as_tensor(neuron.shift))
        neuron.threshold = torch.ones_like(neuron.shift)
    return result


def rate_neurons(net: nn.Module) -> list[Any]:
    """Return the neurons of a converted network, in order."""
    return [module for module in net.modules() if isinstance(module, RateIF)]
