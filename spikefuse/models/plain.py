"""The plain stacks of Liang et al.: the Small, Medium and Large networks, and AlexNet.

Source: Liang et al., "Accelerating Spatiotemporal Supervised Training of Large-Scale Spiking
Neural Networks on GPU", DATE 2022, Table I, for widths; strides and kernels from the authors'
published code, which has the Large network and AlexNet: 3 x 3 kernels, no pooling, no dropout,
and in the three networks a stride of 2 at the last convolution of each width.

Two differences: no bias where batch norm follows, which would take it away again; and batch norm
before each neuron, as in the paper's Fig. 2, where AlexNet's last one in that code has none.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from spikefuse.models.blocks import MakeNeuron, conv_norm, linear_norm

# The output channels and the stride of each convolution.
Convolutions = Sequence[tuple[int, int]]

SMALL = ((128, 2), (256, 2), (512, 2))
MEDIUM = ((128, 1), (128, 1), (128, 2), (256, 1), (256, 2), (512, 1), (512, 2))
LARGE = tuple((width, stride) for width in (128, 256, 512) for stride in (1, 1, 2))
ALEXNET = ((64, 2), (128, 2), (256, 2), (256, 2), (384, 1), (256, 1), (256, 2))


def cifar_small(
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: tuple[int, int],
    norm: bool = True,
) -> nn.Sequential:
    """128C - 256C - 512C - 1024FC - 512FC - FC, which divides the input's size by 8.

    Shapes: `[B, C, H, W]` to `[B, num_classes]`, with any channels and size.

    Args:
        neuron, in_channels, num_classes, size: see `spikefuse.models`.
        norm: False leaves batch norm out, as in the paper's Fig. 7(a), and gives biases.
    """
    return _stack(SMALL, (1024, 512), neuron, in_channels, num_classes, size, norm)


def cifar_medium(
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: tuple[int, int],
    norm: bool = True,
) -> nn.Sequential:
    """3 x 128C - 2 x 256C - 2 x 512C - 1024FC - 512FC - FC; else as `cifar_small`."""
    return _stack(MEDIUM, (1024, 512), neuron, in_channels, num_classes, size, norm)


def cifar_large(
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: tuple[int, int],
    norm: bool = True,
) -> nn.Sequential:
    """3 x 128C - 3 x 256C - 3 x 512C - 1024FC - 512FC - FC; else as `cifar_small`."""
    return _stack(LARGE, (1024, 512), neuron, in_channels, num_classes, size, norm)


def alexnet(
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: tuple[int, int],
    norm: bool = True,
) -> nn.Sequential:
    """64C - 128C - 2 x 256C - 384C - 2 x 256C - 4096FC - 4096FC - FC, which divides the input's
    size by 32; else as `cifar_small`."""
    return _stack(ALEXNET, (4096, 4096), neuron, in_channels, num_classes, size, norm)


def _stack(
    convolutions: Convolutions,
    hidden: Sequence[int],
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: tuple[int, int],
    norm: bool,
) -> nn.Sequential:
    layers: list[nn.Module] = []
    width, (rows, columns) = in_channels, size
    for channels, stride in convolutions:
        if norm:
            layers += conv_norm(width, channels, 3, stride)
        else:
            layers.append(nn.Conv2d(width, channels, 3, stride, padding=1))
        layers.append(neuron())
        width, rows, columns = channels, -(-rows // stride), -(-columns // stride)
    layers.append(nn.Flatten())
    width *= rows * columns
    for features in hidden:
        layers += linear_norm(width, features) if norm else [nn.Linear(width, features)]
        layers.append(neuron())
        width = features
    return nn.Sequential(*layers, nn.Linear(width, num_classes))
