"""Recurrent networks for sequences, such as the spikes of SHD and SSC.

Sources: Baronig et al., "Advancing spatio-temporal processing through adaptation in spiking neural
networks", Nature Communications 2025, arXiv:2408.07517 (widths, pooled inputs, dropout, readout),
whose networks have no batch norm; Bittar and Garner, "A surrogate gradient spiking baseline for
speech command recognition", Frontiers in Neuroscience 2022 (batch norm).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from spikefuse.models.blocks import MakeNeuron, Size, pair
from spikefuse.neurons import LI, AdLIF, SEAdLIF
from spikefuse.neurons.learnable import Learnable
from spikefuse.nn import Recurrent

READOUT_STEPS = 15.0  # time constant
SE_FACTOR = 120.0  # of the couplings of SE-adLIF neurons: q in the source


class _Clipped(Learnable):
    """A learnable value for each neuron, clipped to a range, times `factor`; at first uniform."""

    def __init__(self, low: float, high: float, features: int, factor: float = 1.0) -> None:
        super().__init__()
        self.low, self.high, self.factor = low, high, factor
        self.value = nn.Parameter(torch.empty(features).uniform_(low, high))

    def forward(self) -> Tensor:
        return self.factor * self.value.clamp(self.low, self.high)


def _learned(neuron: nn.Module, features: int) -> nn.Module:
    """Let an adaptive neuron learn its decays and couplings, in the ranges of its source."""
    if not isinstance(neuron, AdLIF | SEAdLIF):
        return neuron

    def decay(shortest: float, longest: float) -> Learnable:
        return _Clipped(math.exp(-1 / shortest), math.exp(-1 / longest), features)

    is_se = isinstance(neuron, SEAdLIF)
    neuron.decay = decay(5, 25)
    neuron.adaptation_decay = decay(60, 300) if is_se else decay(30, 120)
    neuron.coupling = _Clipped(0, 1, features, SE_FACTOR) if is_se else _Clipped(-1, 1, features)
    neuron.jump = _Clipped(0, 2, features, SE_FACTOR if is_se else 1.0)
    return neuron


def recurrent(
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: Size,
    hidden: Sequence[int] = (360, 360),
    pool: int | None = None,
    dropout: float = 0.15,
    feedback: bool = True,
    self_connections: bool = True,
    learned: bool = True,
) -> nn.Sequential:
    """Build a network whose hidden layers receive their own spikes of the previous time step.

    Each hidden layer is linear without bias, batch norm, `Recurrent` and dropout. The readout is a
    linear layer and a leaky integrator with a time constant of 15 steps. `recurrent` has 0.45
    million parameters on the 700 inputs of SHD, in two layers of 360 neurons.

    Shapes: `[B, C, H, W]`, or `[B, C H W]`, to `[B, num_classes]`, for any channels and size.

    Example::

        net = sf.Temporal(sf.models.recurrent(sf.AdLIF, 700, 20, (1, 1), hidden=(128,)))
        logits = net(torch.rand(10, 2, 700)).mean(0)  # [2, 20] of 10 steps

    Args:
        neuron, in_channels, num_classes, size: see `spikefuse.models`.
        hidden: neurons of each hidden layer.
        pool: number of neighbouring inputs that are averaged, 1 for none; None for 5 of the 700
            inputs of SHD and SSC, and none of others.
        dropout: probability that the spike of a hidden neuron is dropped.
        feedback: False builds the feed-forward network of the same widths.
        self_connections: whether a neuron receives its own spikes, see `Recurrent`.
        learned: whether each `AdLIF` and `SEAdLIF` neuron learns its own decays and couplings, in
            the ranges of the sources, from random values. Those of other neurons stay as they are.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    width = in_channels * math.prod(pair(size))
    if pool is None:
        pool = 5 if width == 700 else 1
    if pool > 1:
        layers.append(nn.AvgPool1d(pool, ceil_mode=True))
        width = -(-width // pool)
    for features in hidden:
        layers += [nn.Linear(width, features, bias=False), nn.BatchNorm1d(features)]
        layer = _learned(neuron(), features) if learned else neuron()
        if feedback:
            layer = Recurrent(layer, features, self_connections=self_connections)  # type: ignore[arg-type]
        layers.append(layer)
        layers.append(nn.Dropout(dropout))
        width = features
    readout = LI(math.exp(-1 / READOUT_STEPS), decay_input=True)
    return nn.Sequential(*layers, nn.Linear(width, num_classes), readout)


recurrent_720 = partial(recurrent, hidden=(720, 720))  # Baronig et al., SSC
# Bittar and Garner; dropout and the lack of self-connections as in the authors' code.
recurrent_1024 = partial(
    recurrent, hidden=(1024, 1024), pool=1, dropout=0.1, self_connections=False
)
