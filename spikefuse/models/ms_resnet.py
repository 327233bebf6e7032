"""The ResNet34 of Liang et al., whose shortcuts carry membrane input instead of spikes.

Source: Liang et al., "Accelerating Spatiotemporal Supervised Training of Large-Scale Spiking
Neural Networks on GPU", DATE 2022, Table I. The table does not say where the neurons are. In the
authors' published code a block begins with a neuron, and no neuron follows its sum; Hu et al.,
"Advancing Spiking Neural Networks Toward Deep Residual Learning", IEEE TNNLS 2024, call this a
membrane shortcut. The same code uses stride 2 in all four stages and no pooling in the stem.
"""

from __future__ import annotations

from torch import nn

from spikefuse.models.blocks import MakeNeuron, Residual, Size, conv_norm
from spikefuse.models.resnet import STAGES, basic_branch, residual_network


def ms_resnet34(
    neuron: MakeNeuron, in_channels: int, num_classes: int, size: Size
) -> nn.Sequential:
    """Build a ResNet34 of blocks `x + branch(neuron(x))`.

    Where the shape changes, a block is `shortcut(s) + branch(s)` with `s = neuron(x)`. The network
    divides the input's size by 32. Shapes: `[B, C, H, W]` to `[B, num_classes]`.

    Args:
        neuron, in_channels, num_classes, size: see `spikefuse.models`; `size` is unused.
    """

    def block(width: int, channels: int, stride: int) -> nn.Module:
        layers = nn.Sequential(*basic_branch(neuron, width, channels, stride))
        if stride == 1:
            return Residual(nn.Sequential(neuron(), *layers), nn.Identity(), nn.Identity())
        shortcut = nn.Sequential(*conv_norm(width, channels, 1, stride))
        return nn.Sequential(neuron(), Residual(layers, shortcut, nn.Identity()))

    stem = conv_norm(in_channels, STAGES[0], 7, 2)
    return residual_network(stem, block, 34, num_classes, first_stride=2, last=[neuron()])
