"""A multilayer perceptron."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

HIDDEN = (256, 256)


def mlp(
    neuron: Callable[[], nn.Module], in_channels: int, num_classes: int, size: tuple[int, int]
) -> nn.Sequential:
    """Two hidden layers of 256 neurons, each linear, batch norm, neuron.

    Shapes: `[B, C, H, W]` to `[B, num_classes]`, with any channels and size.

    Args:
        neuron, in_channels, num_classes, size: see `spikefuse.models`.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    width = in_channels * size[0] * size[1]
    for hidden in HIDDEN:
        layers += [nn.Linear(width, hidden, bias=False), nn.BatchNorm1d(hidden), neuron()]
        width = hidden
    return nn.Sequential(*layers, nn.Linear(width, num_classes))
