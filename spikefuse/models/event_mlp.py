"""Multilayer perceptrons on events."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from spikefuse.models.blocks import MakeNeuron
from spikefuse.models.mlp import split_widths
from spikefuse.nn import EventLinear

# Of the poster's networks the one of its headline: 2,944 neurons, less rounding.
HIDDEN = split_widths(3)


def event_mlp(
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: tuple[int, int],
    hidden: Sequence[int] = HIDDEN,
    capacity: float | None = None,
    overflow: str = "drop",
    sparse_grad: bool = False,
) -> nn.Sequential:
    """Hidden layers of `EventLinear`, for input that is spikes: `Events`, or zeros and ones.

    Shapes: `[B, C H W]`, or `Events` of as many sites, to `[B, num_classes]`.

    Source: Finkbeiner and Neftci, "Drastically Improved SNN-Training Throughput on the IPU by
    Utilizing Activation Sparsity".

    Args:
        neuron: its surrogate has a cutoff; else, and in_channels, num_classes, size: see
            `spikefuse.models`.
        hidden: neurons of each hidden layer; `split_widths` makes the poster's.
        capacity, overflow: of the layers that read neurons; the first uses all of its input.
        sparse_grad: of all layers; see `EventLinear`.
    """
    layers: list[nn.Module] = []
    width = in_channels * size[0] * size[1]
    for features in hidden:
        layers.append(
            EventLinear(
                width,
                features,
                neuron(),  # type: ignore[arg-type]
                capacity=capacity if layers else None,
                overflow=overflow,
                sparse_grad=sparse_grad,
            )
        )
        width = features
    last = EventLinear(
        width, num_classes, capacity=capacity, overflow=overflow, sparse_grad=sparse_grad
    )
    return nn.Sequential(*layers, last)
