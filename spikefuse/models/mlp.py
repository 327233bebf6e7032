"""Multilayer perceptrons."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from spikefuse.models.blocks import MakeNeuron, Size, linear_norm

# Neurons per unit of scale, and the numbers of hidden layers over which they can be split.
SPLIT_NEURONS, SPLIT_LAYERS = 1471, (2, 3, 4, 5)


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

    Args:
        neuron, in_channels, num_classes, size: see `spikefuse.models`.
        hidden: neurons of each hidden layer.
        norm: False omits batch norm and gives the linear layers a bias.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    width = in_channels * size[0] * size[1]
    for features in hidden:
        layers += linear_norm(width, features) if norm else [nn.Linear(width, features)]
        layers.append(neuron())
        width = features
    return nn.Sequential(*layers, nn.Linear(width, num_classes))


def split_widths(num_layers: int, scale: int = 2) -> tuple[int, ...]:
    """Return the layer widths when 1471 * `scale` neurons are split evenly, rounded down.

    Raises:
        ValueError: `num_layers` is not 2, 3, 4 or 5, or `scale` is not positive.
    """
    if num_layers not in SPLIT_LAYERS or scale < 1:
        raise ValueError(
            f"num_layers is {num_layers} and scale {scale}: expected 2 to 5 layers and a scale "
            "of at least 1"
        )
    return (SPLIT_NEURONS * scale // num_layers,) * num_layers


def split_mlp(num_layers: int) -> Callable[[MakeNeuron, int, int, Size], nn.Sequential]:
    """Return the builder of a perceptron with about 2,944 neurons in 2 to 5 hidden layers.

    It has no batch norm, so its activity depends on the initial weights. For more neurons, such as
    `scale=4`, build `mlp(..., hidden=split_widths(num_layers, scale), norm=False)`.

    Source: Finkbeiner and Neftci, "Drastically Improved SNN-Training Throughput on the IPU by
    Utilizing Activation Sparsity".

    Raises:
        ValueError: `num_layers` is not 2, 3, 4 or 5.
    """
    hidden = split_widths(num_layers)

    def build(neuron: MakeNeuron, in_channels: int, num_classes: int, size: Size) -> nn.Sequential:
        return mlp(neuron, in_channels, num_classes, size, hidden, norm=False)

    return build
