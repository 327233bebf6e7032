"""Spiking-ResNets: a ResNet with a neuron in place of each ReLU.

Source of the topology: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, with
the stride of a bottleneck at its 3 x 3 convolution, as is usual since; of its spiking form: Li et
al., "Towards Scalable GPU-Accelerated SNN Training via Temporal Fusion", section 5.2. The neuron
after a residual sum receives the sum, as the ReLU does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from spikefuse.models.blocks import MakeNeuron, Residual, conv_norm, projection

# Width of each stage, before a bottleneck's expansion, and blocks per stage by depth.
STAGES = (64, 128, 256, 512)
DEPTHS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
EXPANSION = {18: 1, 34: 1, 50: 4}

# (in_channels, channels, stride) to a block that gives channels * expansion.
Block = Callable[[int, int, int], nn.Module]


def basic_branch(
    neuron: MakeNeuron, in_channels: int, channels: int, stride: int
) -> list[nn.Module]:
    """Two 3 x 3 convolutions, up to the last norm."""
    return [*conv_norm(in_channels, channels, 3, stride), neuron(), *conv_norm(channels, channels)]


def bottleneck_branch(
    neuron: MakeNeuron, in_channels: int, channels: int, stride: int
) -> list[nn.Module]:
    """1 x 1, 3 x 3, and 1 x 1 to four times the channels, up to the last norm."""
    return [
        *conv_norm(in_channels, channels, 1),
        neuron(),
        *conv_norm(channels, channels, 3, stride),
        neuron(),
        *conv_norm(channels, 4 * channels, 1),
    ]


def branch(
    depth: int, neuron: MakeNeuron, in_channels: int, channels: int, stride: int
) -> list[nn.Module]:
    """The layers beside the shortcut in a ResNet of this depth, up to the last norm."""
    make = basic_branch if EXPANSION[depth] == 1 else bottleneck_branch
    return make(neuron, in_channels, channels, stride)


def stem_layers(neuron: MakeNeuron, in_channels: int, stem: str) -> list[nn.Module]:
    """What stands before the blocks: "imagenet", 7 x 7 convolution and max pooling, which quarter
    the size; or "cifar", a 3 x 3 convolution.

    Raises:
        ValueError: another stem.
    """
    if stem not in ("imagenet", "cifar"):
        raise ValueError(f"stem is {stem!r}: expected imagenet or cifar")
    if stem == "cifar":
        return [*conv_norm(in_channels, STAGES[0]), neuron()]
    layers = conv_norm(in_channels, STAGES[0], 7, 2)
    return [*layers, neuron(), nn.MaxPool2d(3, stride=2, padding=1)]


def residual_network(
    stem: Sequence[nn.Module],
    block: Block,
    depth: int,
    num_classes: int,
    first_stride: int = 1,
    last: Sequence[nn.Module] = (),
) -> nn.Sequential:
    """Stem, four stages of blocks, `last`, mean over the image, linear layer.

    Each stage but the first halves the size, and the first does with `first_stride` 2.
    """
    layers, width = list(stem), STAGES[0]
    for channels, num_blocks in zip(STAGES, DEPTHS[depth], strict=True):
        for index in range(num_blocks):
            stride = 1 if index else 2 if channels > STAGES[0] else first_stride
            layers.append(block(width, channels, stride))
            width = EXPANSION[depth] * channels
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes)]
    return nn.Sequential(*layers, *last, *head)


def resnet18(
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: tuple[int, int],
    stem: str = "imagenet",
) -> nn.Sequential:
    """Spiking-ResNet18, by default with the stem of the original.

    Shapes: `[B, C, H, W]` to `[B, num_classes]`, with any channels and size.

    Args:
        neuron, in_channels, num_classes, size: see `spikefuse.models`; `size` is not needed.
        stem: "imagenet", which quarters the size; or "cifar", which keeps it: `stem_layers`.

    Raises:
        ValueError: another stem.
    """
    return _resnet(18, neuron, in_channels, num_classes, stem)


def resnet34(
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: tuple[int, int],
    stem: str = "imagenet",
) -> nn.Sequential:
    """Spiking-ResNet34; else as `resnet18`."""
    return _resnet(34, neuron, in_channels, num_classes, stem)


def resnet50(
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: tuple[int, int],
    stem: str = "imagenet",
) -> nn.Sequential:
    """Spiking-ResNet50, of bottlenecks; else as `resnet18`."""
    return _resnet(50, neuron, in_channels, num_classes, stem)


def _resnet(
    depth: int, neuron: MakeNeuron, in_channels: int, num_classes: int, stem: str
) -> nn.Sequential:
    def block(width: int, channels: int, stride: int) -> nn.Module:
        shortcut = projection(width, EXPANSION[depth] * channels, stride)
        layers = branch(depth, neuron, width, channels, stride)
        return Residual(nn.Sequential(*layers), nn.Sequential(*shortcut), neuron())

    return residual_network(stem_layers(neuron, in_channels, stem), block, depth, num_classes)
