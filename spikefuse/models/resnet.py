"""Residual networks: Spiking-ResNets, with a neuron in place of each ReLU, and MS-ResNets.

Sources of `resnet`: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, with the
stride of a bottleneck at its 3 x 3 convolution, as usual today; Li et al., "Towards Scalable
GPU-Accelerated SNN Training via Temporal Fusion", section 5.2. A neuron after a residual sum
receives the sum, as the ReLU does.

Source of `ms_resnet`: Hu et al., "Advancing Spiking Neural Networks Toward Deep Residual Learning",
IEEE TNNLS 2024, and the authors' published code. A block begins with a neuron, and no neuron
follows its sum. For ImageNet, all four stages have stride 2, and the stem has no pooling.
`ms_resnet104` has the stem of the paper; the code has three 3 x 3 convolutions there. `ms_resnet34`
is the ResNet34 of Liang et al., "Accelerating Spatiotemporal Supervised Training of Large-Scale
Spiking Neural Networks on GPU", DATE 2022, Table I, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from spikefuse.models.blocks import (
    MakeNeuron,
    Residual,
    Size,
    conv_norm,
    global_average,
    max_pool,
    residual,
)

# Width of each stage before the expansion of a bottleneck, and blocks per stage by depth.
STAGES = (64, 128, 256, 512)
DEPTHS = {
    **{18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 104: (3, 8, 32, 8)},
    **{50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)},
}
EXPANSION = {depth: 4 if depth in (50, 101, 152) else 1 for depth in DEPTHS}

# Maps (in_channels, channels, stride) to a block with channels * expansion outputs.
MakeBlock = Callable[[int, int, int], nn.Module]


def branch(
    depth: int, neuron: MakeNeuron, in_channels: int, channels: int, stride: int
) -> list[nn.Module]:
    """Return the layers beside the shortcut in a ResNet of this depth, up to the last norm.

    A basic block has two 3 x 3 convolutions. A bottleneck has 1 x 1, 3 x 3, and 1 x 1 convolutions,
    the last with four times the channels.
    """
    if EXPANSION[depth] == 1:
        first = conv_norm(in_channels, channels, 3, stride)
        return [*first, neuron(), *conv_norm(channels, channels)]
    return [
        *conv_norm(in_channels, channels, 1),
        neuron(),
        *conv_norm(channels, channels, 3, stride),
        neuron(),
        *conv_norm(channels, 4 * channels, 1),
    ]


def projection(depth: int, in_channels: int, channels: int, stride: int) -> list[nn.Module]:
    """Return the layers of a shortcut in a ResNet of this depth; none if the shape stays."""
    outputs = EXPANSION[depth] * channels
    if stride == 1 and in_channels == outputs:
        return []
    return conv_norm(in_channels, outputs, 1, stride)


def stem_layers(neuron: MakeNeuron, in_channels: int, stem: str) -> list[nn.Module]:
    """Return the layers before the blocks.

    "imagenet" is a 7 x 7 convolution and max pooling, which divide the size by 4; "cifar" is a
    3 x 3 convolution.

    Raises:
        ValueError: another stem.
    """
    if stem not in ("imagenet", "cifar"):
        raise ValueError(f"stem is {stem!r}: expected imagenet or cifar")
    if stem == "cifar":
        return [*conv_norm(in_channels, STAGES[0]), neuron()]
    layers = conv_norm(in_channels, STAGES[0], 7, 2)
    return [*layers, neuron(), max_pool()]


def residual_network(
    stem: Sequence[nn.Module],
    block: MakeBlock,
    depth: int,
    num_classes: int,
    first_stride: int = 1,
    last: Sequence[nn.Module] = (),
) -> nn.Sequential:
    """Build a network of stem, four stages of blocks, `last`, global average and linear layer.

    All stages but the first halve the size; the first has stride `first_stride`.
    """
    layers, width = list(stem), STAGES[0]
    for channels, num_blocks in zip(STAGES, DEPTHS[depth], strict=True):
        for index in range(num_blocks):
            stride = 1 if index else 2 if channels > STAGES[0] else first_stride
            layers.append(block(width, channels, stride))
            width = EXPANSION[depth] * channels
    return nn.Sequential(*layers, *last, *global_average(width, num_classes))


def resnet(
    depth: int,
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: Size,
    stem: str = "imagenet",
) -> nn.Sequential:
    """Build a Spiking-ResNet.

    Shapes: `[B, C, H, W]` to `[B, num_classes]`, for any channels and size.

    Example::

        net = sf.Temporal(sf.models.resnet18(sf.LIF, 3, 10, (32, 32), stem="cifar"))
        logits = net(torch.rand(2, 4, 3, 32, 32)).mean(0)  # [4, 10] of 2 steps

    Args:
        depth: 18 or 34, or 50, which has bottlenecks.
        neuron, in_channels, num_classes, size: see `spikefuse.models`; `size` is unused.
        stem: "imagenet", which divides the size by 4, or "cifar", which keeps it; see
            `stem_layers`.

    Raises:
        ValueError: another stem.
    """

    def block(width: int, channels: int, stride: int) -> nn.Module:
        shortcut = projection(depth, width, channels, stride)
        layers = branch(depth, neuron, width, channels, stride)
        return Residual(nn.Sequential(*layers), nn.Sequential(*shortcut), neuron())

    return residual_network(stem_layers(neuron, in_channels, stem), block, depth, num_classes)


resnet18, resnet34, resnet50 = (partial(resnet, depth) for depth in (18, 34, 50))


def ms_resnet(
    depth: int,
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: Size,
    stem: str = "imagenet",
) -> nn.Sequential:
    """Build a ResNet of blocks `x + branch(neuron(x))`, whose shortcuts carry membrane input.

    Where the shape changes, a block is `shortcut(s) + branch(s)` with `s = neuron(x)`. Shapes:
    `[B, C, H, W]` to `[B, num_classes]`.

    Example::

        net = sf.Temporal(sf.models.ms_resnet18(sf.LIF, 3, 10, (32, 32), stem="cifar"))

    Args:
        depth: 18, 34, or 104, whose shortcuts average 2 x 2 pixels before a projection.
        neuron, in_channels, num_classes, size: see `spikefuse.models`; `size` is unused.
        stem: "imagenet", a 7 x 7 convolution in a network that divides the size by 32, or "cifar",
            a 3 x 3 convolution in one that divides it by 8.

    Raises:
        ValueError: another stem.
    """
    # Without the neuron and the pooling: a block begins with a neuron.
    first = stem_layers(nn.Identity, in_channels, stem)[:2]
    first_stride = 1 if stem == "cifar" else 2

    def block(width: int, channels: int, stride: int) -> nn.Module:
        layers = branch(depth, neuron, width, channels, stride)
        if stride == 1:
            return residual(neuron(), *layers)
        shortcut = conv_norm(width, channels, 1, stride)
        if depth == 104:
            shortcut = [nn.AvgPool2d(2, ceil_mode=True), *conv_norm(width, channels, 1)]
        joined = Residual(nn.Sequential(*layers), nn.Sequential(*shortcut), nn.Identity())
        return nn.Sequential(neuron(), joined)

    return residual_network(first, block, depth, num_classes, first_stride, last=[neuron()])


ms_resnet18, ms_resnet34, ms_resnet104 = (partial(ms_resnet, depth) for depth in (18, 34, 104))
