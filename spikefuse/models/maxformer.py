"""Max-Former: a spiking transformer that keeps high frequencies of an image.

Neurons are low-pass filters. Max poolings between stages, and depthwise convolutions in place of
attention in the first two stages, restore what they lose.

Source: Fang et al., "Spiking Neural Networks Need High-Frequency Information", NeurIPS 2025, and
the authors' published code, which uses LIF neurons with `decay=0.5`, `decay_input=True` and
`detach_reset=True`. Tokens keep the shape of an image, and convolutions before a norm have no bias.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from spikefuse.models.blocks import MakeNeuron, Residual, Size, conv_norm, max_pool, residual
from spikefuse.models.spike_driven import membrane_mlp, spiking_head
from spikefuse.models.spikformer import SpikingSelfAttention, check_heads


def maxformer(
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: Size,
    depths: tuple[int, int, int] = (1, 2, 7),
    channels: int = 384,
    num_heads: int = 6,
    mlp_ratio: int = 4,
) -> nn.Sequential:
    """Build Max-Former-`sum(depths)`-`channels` for ImageNet.

    Shapes: `[B, C, H, W]` to `[B, num_classes]`, for any channels and size; tokens of the three
    stages have 4, 8 and 16 rows of pixels.

    Example::

        net = sf.Temporal(sf.models.maxformer_10_384(sf.LIF, 3, 10, (64, 64)))

    Args:
        neuron, in_channels, num_classes, size: see `spikefuse.models`; `size` is unused.
        depths: blocks of the three stages. The first two have depthwise convolutions of 7 x 7 and
            5 x 5, the last has `SpikingSelfAttention`.
        channels: channels of the last stage; the first two have a quarter and half of them.
        num_heads: attention heads, a divisor of `channels`.
        mlp_ratio: width of a block's hidden layer relative to its channels.

    Raises:
        ValueError: `channels` is not divisible by 8 and by `num_heads`.
    """
    check_heads(channels, num_heads)
    if channels % 8:
        raise ValueError(f"channels is {channels}: expected a multiple of 8")
    width = channels // 8
    layers = conv_norm(in_channels, width, 3, 2)
    for stage, depth in enumerate(depths):
        layers += [neuron(), _patches(neuron, width, pooled=stage > 0)]
        width *= 2
        for _ in range(depth):
            mix = (
                [SpikingSelfAttention(neuron, width, num_heads)]
                if stage == 2
                else conv_norm(width, width, 7 - 2 * stage, groups=width)
            )
            layers.append(residual(neuron(), *mix))
            layers.append(membrane_mlp(neuron, width, mlp_ratio * width))
    return nn.Sequential(*layers, *spiking_head(neuron, width, num_classes))


def _patches(neuron: MakeNeuron, width: int, pooled: bool) -> nn.Module:
    """Return two convolutions of spikes that double the channels, and a projection beside them.

    Both halve the size: the first two by a stride, those that are `pooled` by max pooling.
    """
    stride, pooling = (1, max_pool) if pooled else (2, nn.Identity)
    branch = [*conv_norm(width, 2 * width, 3, stride), pooling(), neuron()]
    branch += conv_norm(2 * width, 2 * width)
    shortcut = [*conv_norm(width, 2 * width, 1, stride), pooling()]
    return Residual(nn.Sequential(*branch), nn.Sequential(*shortcut), nn.Identity())


maxformer_10_384, maxformer_10_512, maxformer_10_768 = (
    partial(maxformer, channels=channels, num_heads=channels // 64) for channels in (384, 512, 768)
)
