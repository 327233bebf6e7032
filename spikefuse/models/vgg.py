"""A spiking VGG for event data such as CIFAR10-DVS.

Source: Deng et al., "Temporal Efficient Training of Spiking Neural Network via Gradient
Re-weighting", ICLR 2022, whose VGGSNN is a VGG-11 with one linear layer, for events at 48 x 48
and LIF neurons with a decay of 0.5.
"""

from __future__ import annotations

from torch import nn

from spikefuse.models.blocks import MakeNeuron, Size, conv_norm

STAGES = ((64, 128), (256, 256), (512, 512), (512, 512))


def vggsnn(neuron: MakeNeuron, in_channels: int, num_classes: int, size: Size) -> nn.Sequential:
    """Build 64C - 128C - AP - 2 x 256C - AP - 2 x 512C - AP - 2 x 512C - AP - FC.

    C is a 3 x 3 convolution without bias, batch norm and neuron; AP is 2 x 2 average pooling, which
    rounds odd sizes up.

    Shapes: `[B, C, H, W]` to `[B, num_classes]`, for any channels and size.

    Args:
        neuron, in_channels, num_classes, size: see `spikefuse.models`.
    """
    layers: list[nn.Module] = []
    width, (rows, columns) = in_channels, size
    for stage in STAGES:
        for channels in stage:
            layers += [*conv_norm(width, channels), neuron()]
            width = channels
        layers.append(nn.AvgPool2d(2, ceil_mode=True))
        rows, columns = -(-rows // 2), -(-columns // 2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * rows * columns, num_classes))
