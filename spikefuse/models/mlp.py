"""Multilayer perceptrons on tensors and on events.

Source of `event_mlp` and of the widths of `split_widths`: Finkbeiner and Neftci, "Drastically
Improved SNN-Training Throughput on the IPU by Utilizing Activation Sparsity".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from spikefuse.models.blocks import MakeNeuron, Size, pair, perceptron
from spikefuse.nn import EventLinear

# Neurons per unit of scale, and the numbers of hidden layers over which they can be split.
SPLIT_NEURONS, SPLIT_LAYERS = 1471, (2, 3, 4, 5)


def split_widths(num_layers: int, scale: int = 2) -> tuple[int, ...]:
    """Return the layer widths when 1471 * `scale` neurons are split evenly, rounded down.

    Example::

        net = sf.models.mlp(sf.LIF, 1, 10, (28, 28), hidden=sf.models.split_widths(3))

    Args:
        num_layers: 2 to 5.
        scale: at least 1.

    Raises:
        ValueError: `num_layers` is not 2, 3, 4 or 5, or `scale` is not positive.
    """
    if num_layers not in SPLIT_LAYERS or scale < 1:
        raise ValueError(
            f"num_layers is {num_layers} and scale {scale}: expected 2 to 5 layers and a scale "
            "of at least 1"
        )
    return (SPLIT_NEURONS * scale // num_layers,) * num_layers


def mlp(
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: Size,
    hidden: Sequence[int] = (256, 256),
    norm: bool = True,
) -> nn.Sequential:
    """Build a perceptron; each hidden layer is linear, batch norm, neuron.

    Shapes: `[B, C, H, W]` to `[B, num_classes]`, for any channels and size.

    Example::

        net = sf.Temporal(sf.models.mlp(sf.LIF, 1, 10, (28, 28), hidden=(128,)))
        logits = net(torch.rand(4, 2, 784)).mean(0)  # [2, 10] of 4 steps

    Args:
        neuron, in_channels, num_classes, size: see `spikefuse.models`.
        hidden: neurons of each hidden layer.
        norm: False omits batch norm and gives the linear layers a bias.
    """
    widths = [in_channels * math.prod(pair(size)), *hidden, num_classes]
    return nn.Sequential(nn.Flatten(), *perceptron(neuron, widths, norm))


def event_mlp(
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: Size,
    hidden: Sequence[int] = split_widths(3),
    capacity: float | None = None,
    overflow: str = "drop",
) -> nn.Sequential:
    """Build a perceptron of `EventLinear` layers for spikes: `Events`, or zeros and ones.

    Shapes: `[B, C H W]`, or `Events` with as many sites, to `[B, num_classes]`.

    Example::

        def neuron():
            return sf.LIF(0.95, surrogate=sf.surrogate.FastSigmoid(cutoff=-0.1))

        net = sf.Temporal(sf.models.event_mlp(neuron, 1, 10, (28, 28), hidden=(128,)))
        logits = net((torch.rand(4, 2, 784) < 0.01).float()).mean(0)  # [2, 10] of 4 steps

    Args:
        neuron, in_channels, num_classes, size: see `spikefuse.models`; the surrogate of `neuron`
            needs a cutoff.
        hidden: neurons of each hidden layer; by default the paper's 2,940 in three layers.
        capacity, overflow: see `EventLinear`; the first layer uses all of its input.
    """
    widths = [in_channels * math.prod(pair(size)), *hidden, num_classes]
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
