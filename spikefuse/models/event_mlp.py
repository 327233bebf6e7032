"""Multilayer perceptrons on events."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from spikefuse.models.blocks import MakeNeuron, Size
from spikefuse.models.mlp import split_widths
from spikefuse.nn import EventLinear

# The paper's main network: about 2,944 neurons in three layers.
HIDDEN = split_widths(3)


def event_mlp(
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: Size,
    hidden: Sequence[int] = HIDDEN,
    capacity: float | None = None,
    overflow: str = "drop",
) -> nn.Sequential:
    """Build a perceptron of `EventLinear` layers for spikes: `Events`, or zeros and ones.

    Shapes: `[B, C H W]`, or `Events` with as many sites, to `[B, num_classes]`.

    Source: Finkbeiner and Neftci, "Drastically Improved SNN-Training Throughput on the IPU by
    Utilizing Activation Sparsity".

    Args:
        neuron, in_channels, num_classes, size: see `spikefuse.models`; the neuron's surrogate needs
            a cutoff.
        hidden: neurons of each hidden layer; `split_widths` returns the paper's.
        capacity, overflow: see `EventLinear`; the first layer uses all of its input.
    """
    widths = [in_channels * size[0] * size[1], *hidden, num_classes]
    layers = [
        EventLinear(
            widths[i],
            widths[i + 1],
            neuron() if i < len(hidden) else None,  # type: ignore[arg-type]
            capacity=capacity if i else None,
            overflow=overflow,
        )
        for i in range(len(widths) - 1)
    ]
    return nn.Sequential(*layers)
