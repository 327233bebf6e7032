"""The feedforward networks of Liang et al.: Small, Medium, Large, and AlexNet.

Source: Liang et al., "Accelerating Spatiotemporal Supervised Training of Large-Scale Spiking
Neural Networks on GPU", DATE 2022, Table I, for widths. Strides and kernels follow the authors'
published code of the Large network and AlexNet: 3 x 3 kernels, no pooling, no dropout, and in the
first three networks a stride of 2 at the last convolution of each width.

Two differences: convolutions before batch norm have no bias, which batch norm would remove; and
all neurons follow a batch norm, as in the paper's Fig. 2, unlike the last one of AlexNet in that
code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from spikefuse.models.blocks import MakeNeuron, Size, conv_norm, linear_norm


class PlainStack(NamedTuple):
    """Output channels and stride of each convolution, then the widths of the linear layers."""

    convolutions: Sequence[tuple[int, int]]
    hidden: Sequence[int]


SMALL = PlainStack(((128, 2), (256, 2), (512, 2)), (1024, 512))
MEDIUM = PlainStack(
    ((128, 1), (128, 1), (128, 2), (256, 1), (256, 2), (512, 1), (512, 2)), (1024, 512)
)
LARGE = PlainStack(
    tuple((width, stride) for width in (128, 256, 512) for stride in (1, 1, 2)), (1024, 512)
)
ALEXNET = PlainStack(
    ((64, 2), (128, 2), (256, 2), (256, 2), (384, 1), (256, 1), (256, 2)), (4096, 4096)
)


def cifar_small(
    neuron: MakeNeuron, in_channels: int, num_classes: int, size: Size, norm: bool = True
) -> nn.Sequential:
    """Build 128C - 256C - 512C - 1024FC - 512FC - FC, which divides the input's size by 8.

    Shapes: `[B, C, H, W]` to `[B, num_classes]`, for any channels and size.

    Args:
        neuron, in_channels, num_classes, size: see `spikefuse.models`.
        norm: False omits batch norm, as in the paper's Fig. 7(a), and adds biases.
    """
    return _build(SMALL, neuron, in_channels, num_classes, size, norm)


def cifar_medium(
    neuron: MakeNeuron, in_channels: int, num_classes: int, size: Size, norm: bool = True
) -> nn.Sequential:
    """Build 3 x 128C - 2 x 256C - 2 x 512C - 1024FC - 512FC - FC; see `cifar_small`."""
    return _build(MEDIUM, neuron, in_channels, num_classes, size, norm)


def cifar_large(
    neuron: MakeNeuron, in_channels: int, num_classes: int, size: Size, norm: bool = True
) -> nn.Sequential:
    """Build 3 x 128C - 3 x 256C - 3 x 512C - 1024FC - 512FC - FC; see `cifar_small`."""
    return _build(LARGE, neuron, in_channels, num_classes, size, norm)


def alexnet(
    neuron: MakeNeuron, in_channels: int, num_classes: int, size: Size, norm: bool = True
) -> nn.Sequential:
    """Build 64C - 128C - 2 x 256C - 384C - 2 x 256C - 4096FC - 4096FC - FC; see `cifar_small`.

    It divides the input's size by 32.
    """
    return _build(ALEXNET, neuron, in_channels, num_classes, size, norm)


def _build(
    stack: PlainStack, neuron: MakeNeuron, width: int, num_classes: int, size: Size, norm: bool
) -> nn.Sequential:
    layers: list[nn.Module] = []
    rows, columns = size
    for channels, stride in stack.convolutions:
        if norm:
            layers += conv_norm(width, channels, 3, stride)
        else:
            layers.append(nn.Conv2d(width, channels, 3, stride, padding=1))
        layers.append(neuron())
        width, rows, columns = channels, -(-rows // stride), -(-columns // stride)
    layers.append(nn.Flatten())
    width *= rows * columns
    for features in stack.hidden:
        layers += linear_norm(width, features) if norm else [nn.Linear(width, features)]
        layers.append(neuron())
        width = features
    return nn.Sequential(*layers, nn.Linear(width, num_classes))
