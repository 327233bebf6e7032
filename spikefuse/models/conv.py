"""A small convolutional network."""

from __future__ import annotations

from torch import nn

from spikefuse.models.blocks import MakeNeuron, Size, conv_norm

CHANNELS = (32, 64)


def conv(neuron: MakeNeuron, in_channels: int, num_classes: int, size: Size) -> nn.Sequential:
    """Build two stages of 3 x 3 convolution, batch norm, neuron and 2 x 2 average pooling.

    The stages have 32 and 64 channels. Shapes: `[B, C, H, W]` to `[B, num_classes]`.

    Args:
        neuron, in_channels, num_classes, size: see `spikefuse.models`.

    Raises:
        ValueError: the input is smaller than 4 x 4.
    """
    if min(size) < 2 ** len(CHANNELS):
        raise ValueError(f"size is {size}: the conv model needs at least (4, 4)")
    layers: list[nn.Module] = []
    height, width = size
    for channels in CHANNELS:
        layers += [*conv_norm(in_channels, channels), neuron(), nn.AvgPool2d(2)]
        in_channels, height, width = channels, height // 2, width // 2
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(in_channels * height * width, num_classes)
    )
