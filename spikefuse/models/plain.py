"""Convolutional networks without shortcuts.

Source of `cifar_small`, `cifar_medium`, `cifar_large` and `alexnet`: Liang et al., "Accelerating
Spatiotemporal Supervised Training of Large-Scale Spiking Neural Networks on GPU", DATE 2022, Table
I, for widths. Strides and kernels follow the authors' published code of the Large network and
AlexNet: 3 x 3 kernels, no pooling, no dropout, and in the first three networks a stride of 2 at the
last convolution of each width. Two differences: convolutions before batch norm have no bias, which
batch norm would remove; and all neurons follow a batch norm, as in the paper's Fig. 2, unlike the
last one of AlexNet in that code.

Source of `vgg11` and `vgg16`: Simonyan and Zisserman, "Very Deep Convolutional Networks for
Large-Scale Image Recognition", ICLR 2015, Table 1, columns A and D, with batch norm after each
convolution, as is usual in the literature on spiking networks, and without dropout.

Source of `vggsnn`: Deng et al., "Temporal Efficient Training of Spiking Neural Network via Gradient
Re-weighting", ICLR 2022, whose VGGSNN is a VGG-11 with one linear layer, for events at 48 x 48 and
LIF neurons with a decay of 0.5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from torch import nn

from spikefuse.models.blocks import MakeNeuron, Size, conv_norm, pair, perceptron

# Output channels of each convolution; a pooling ends each stage.
Stages = Sequence[Sequence[int]]
VGGSNN: Stages = ((64, 128), (256, 256), (512, 512), (512, 512))
VGG11: Stages = ((64,), (128,), (256, 256), (512, 512), (512, 512))
VGG16: Stages = ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3)
POOLINGS: dict[str, Callable[..., nn.Module]] = {"max": nn.MaxPool2d, "average": nn.AvgPool2d}


def conv(neuron: MakeNeuron, in_channels: int, num_classes: int, size: Size) -> nn.Sequential:
    """Build two stages of 3 x 3 convolution, batch norm, neuron and 2 x 2 average pooling.

    The stages have 32 and 64 channels. Shapes: `[B, C, H, W]` to `[B, num_classes]`.

    Example::

        net = sf.Temporal(sf.models.conv(sf.LIF, 1, 10, (28, 28)))
        logits = net(torch.rand(4, 2, 1, 28, 28)).mean(0)  # [2, 10] of 4 steps

    Args:
        neuron, in_channels, num_classes, size: see `spikefuse.models`.

    Raises:
        ValueError: the input is smaller than 4 x 4.
    """
    if min(pair(size)) < 4:
        raise ValueError(f"size is {size}: the conv model needs at least (4, 4)")
    first = [*conv_norm(in_channels, 32), neuron(), nn.AvgPool2d(2)]
    second = [*conv_norm(32, 64), neuron(), nn.AvgPool2d(2)]
    features = 64 * (size[0] // 4) * (size[1] // 4)
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(features, num_classes))


def vgg(
    stages: Stages,
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: Size,
    hidden: Sequence[int] = (4096, 4096),
    pooling: str = "max",
) -> nn.Sequential:
    """Build stages of 3 x 3 convolutions that end in a pooling, and linear layers.

    Each convolution is followed by batch norm and a neuron, each hidden linear layer by a neuron.
    A pooling halves the size, rounded up.

    Shapes: `[B, C, H, W]` to `[B, num_classes]`, for any channels and size.

    Example::

        net = sf.Temporal(sf.models.vggsnn(sf.LIF, 2, 10, (48, 48)))

    Args:
        stages: channels of the convolutions.
        neuron, in_channels, num_classes, size: see `spikefuse.models`.
        hidden: neurons of each hidden linear layer; `()` is usual for CIFAR.
        pooling: "max" or "average", of 2 x 2.

    Raises:
        ValueError: another pooling.
    """
    if pooling not in POOLINGS:
        raise ValueError(f"pooling is {pooling!r}: expected max or average")
    layers: list[nn.Module] = []
    width = in_channels
    for stage in stages:
        for channels in stage:
            layers += [*conv_norm(width, channels), neuron()]
            width = channels
        layers.append(POOLINGS[pooling](2, ceil_mode=True))
    features = width * math.prod(-(-side // 2 ** len(stages)) for side in pair(size))
    widths = [features, *hidden, num_classes]
    return nn.Sequential(*layers, nn.Flatten(), *perceptron(neuron, widths, norm=False))


vgg11, vgg16 = partial(vgg, VGG11), partial(vgg, VGG16)
vggsnn = partial(vgg, VGGSNN, hidden=(), pooling="average")


class PlainStack(NamedTuple):
    """Output channels and stride of each convolution, then the widths of the linear layers."""

    convolutions: Sequence[tuple[int, int]]
    hidden: Sequence[int]


def plain(
    stack: PlainStack,
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: Size,
    norm: bool = True,
) -> nn.Sequential:
    """Build a stack of 3 x 3 convolutions and linear layers, each with batch norm and neuron.

    Shapes: `[B, C, H, W]` to `[B, num_classes]`, for any channels and size.

    Example::

        net = sf.Temporal(sf.models.cifar_small(sf.LIF, 3, 10, (32, 32)))

    Args:
        stack: the layers.
        neuron, in_channels, num_classes, size: see `spikefuse.models`.
        norm: False omits batch norm, as in the paper's Fig. 7(a), and adds biases.
    """
    layers: list[nn.Module] = []
    width = in_channels
    for channels, stride in stack.convolutions:
        layers += [*conv_norm(width, channels, 3, stride, norm), neuron()]
        width = channels
    divisor = math.prod(stride for _, stride in stack.convolutions)
    features = width * math.prod(-(-side // divisor) for side in pair(size))
    widths = [features, *stack.hidden, num_classes]
    return nn.Sequential(*layers, nn.Flatten(), *perceptron(neuron, widths, norm))


# These divide the input's size by 8, and AlexNet by 32.
SMALL = ((128, 2), (256, 2), (512, 2))
MEDIUM = ((128, 1), (128, 1), (128, 2), (256, 1), (256, 2), (512, 1), (512, 2))
LARGE = tuple((width, stride) for width in (128, 256, 512) for stride in (1, 1, 2))
ALEXNET = ((64, 2), (128, 2), (256, 2), (256, 2), (384, 1), (256, 1), (256, 2))

cifar_small = partial(plain, PlainStack(SMALL, (1024, 512)))
cifar_medium = partial(plain, PlainStack(MEDIUM, (1024, 512)))
cifar_large = partial(plain, PlainStack(LARGE, (1024, 512)))
alexnet = partial(plain, PlainStack(ALEXNET, (4096, 4096)))
