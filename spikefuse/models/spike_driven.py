"""Spike-driven Transformers, whose layers receive spikes and whose shortcuts carry membrane input.

Source of `sdt`: Yao et al., "Spike-driven Transformer", NeurIPS 2023. Source of `sdt_v2`: Yao et
al., "Spike-driven Transformer V2: Meta Spiking Neural Network Architecture Inspiring the Design of
Next-generation Neuromorphic Chips", ICLR 2024. Source of `sdt_v3`: Yao et al., "Scaling
Spike-driven Transformer with Efficient Spike Firing Approximation Training", TPAMI 2025. They
follow the authors' published code where a paper is silent. The first two use LIF neurons with
`decay=0.5`, `decay_input=True` and `detach_reset=True`, the third one integers, see `sdt_v3`.

Tokens keep the shape of an image, and convolutions before a norm have no bias.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from spikefuse.models.blocks import MakeNeuron, Size, conv_norm, global_average, residual
from spikefuse.models.spikformer import (
    DOUBLED,
    SpikingSelfAttention,
    check_heads,
    patches,
    pointwise,
)


class SpikeDrivenAttention(nn.Module):
    """`projection(q neuron(Σ k v))`, where the sum over tokens is a mask of the channels.

    q, k and v are spikes. The sum is doubled, see `DOUBLED`.
    """

    def __init__(self, neuron: MakeNeuron, channels: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Sequential(*pointwise(channels), neuron()) for _ in range(3))
        self.neuron = neuron()
        self.projection = nn.Sequential(*pointwise(channels))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.neuron(DOUBLED * (self.k(x) * self.v(x)).sum((2, 3), keepdim=True))
        return self.projection(self.q(x) * chosen)


def membrane_mlp(neuron: MakeNeuron, channels: int, hidden: int, kernel: int = 1) -> nn.Module:
    """Return two layers that begin with neurons, with a shortcut."""
    expand, reduce = conv_norm(channels, hidden, kernel), conv_norm(hidden, channels, kernel)
    return residual(neuron(), *expand, neuron(), *reduce)


def sdt(
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: Size,
    depth: int = 2,
    channels: int = 512,
    mlp_ratio: int = 4,
    num_poolings: int = 2,
) -> nn.Sequential:
    """Build Spike-driven Transformer-`depth`-`channels`; `sdt` is 2-512 for CIFAR.

    Attention heads make no difference, since the mask is per channel.

    Shapes: `[B, C, H, W]` to `[B, num_classes]`, for any channels and size.

    Example::

        net = sf.Temporal(sf.models.sdt(sf.LIF, 3, 10, (32, 32), channels=256))

    Args:
        neuron, in_channels, num_classes, size: see `spikefuse.models`; `size` is unused.
        depth: encoder blocks.
        channels: channels of a token, divisible by 8.
        mlp_ratio: width of a block's hidden layer relative to `channels`.
        num_poolings: max poolings among the first layers, as in `spikformer`, from 1 to 4.

    Raises:
        ValueError: `channels` is not divisible by 8.
    """
    # The last pooling precedes its neuron, whose input is the shortcut of the position embedding.
    *layers, neuron_, pooling = patches(neuron, in_channels, channels, num_poolings)
    layers += [pooling, residual(neuron_, *conv_norm(channels, channels))]
    for _ in range(depth):
        layers.append(residual(neuron(), SpikeDrivenAttention(neuron, channels)))
        layers.append(membrane_mlp(neuron, channels, mlp_ratio * channels))
    return nn.Sequential(*layers, *spiking_head(neuron, channels, num_classes))


# For ImageNet.
sdt_8_384, sdt_8_512, sdt_8_768 = (
    partial(sdt, depth=8, channels=channels, num_poolings=4) for channels in (384, 512, 768)
)


def sdt_v2(
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: Size,
    channels: tuple[int, int, int, int] = (64, 128, 256, 360),
    depths: tuple[int, int] = (6, 2),
    num_heads: int = 8,
    mlp_ratio: int = 4,
) -> nn.Sequential:
    """Build Meta-SpikeFormer, with 15, 31 or 55 million parameters.

    Shapes: `[B, C, H, W]` to `[B, num_classes]`, for any channels and size; tokens have 16 x 16
    pixels.

    Example::

        net = sf.Temporal(sf.models.sdt_v2_15m(sf.LIF, 3, 10, (64, 64)))

    Args:
        neuron, in_channels, num_classes, size: see `spikefuse.models`; `size` is unused.
        channels: channels of the four stages; the first begins with half of them. The first two
            stages have blocks of convolutions, the others have attention.
        depths: blocks of the two stages with attention.
        num_heads: attention heads, a divisor of the channels of the last two stages.
        mlp_ratio: width of a block's hidden layer relative to its channels.

    Raises:
        ValueError: `num_heads` does not divide the channels.
    """
    for width in channels[2:]:
        check_heads(width, num_heads)
    width = channels[0] // 2
    layers = conv_norm(in_channels, width, 7, 2)
    layers += _convolutions(neuron, width, mlp_ratio)
    for outputs, blocks in zip(channels[:2], (1, 2), strict=True):
        layers += [neuron(), *conv_norm(width, outputs, 3, 2)]
        width = outputs
        for _ in range(blocks):
            layers += _convolutions(neuron, width, mlp_ratio)
    for outputs, blocks, stride in zip(channels[2:], depths, (2, 1), strict=True):
        layers += [neuron(), *conv_norm(width, outputs, 3, stride)]
        width = outputs
        for _ in range(blocks):
            attention = SpikingSelfAttention(neuron, width, num_heads, projection=_separable)
            layers.append(residual(neuron(), attention))
            layers.append(membrane_mlp(neuron, width, mlp_ratio * width))
    return nn.Sequential(*layers, *spiking_head(neuron, width, num_classes))


class WideAttention(SpikingSelfAttention):
    """`SpikingSelfAttention` whose v has more channels than q and k."""

    def __init__(
        self, neuron: MakeNeuron, channels: int, num_heads: int, value_ratio: int = 4
    ) -> None:
        super().__init__(neuron, channels, num_heads, 2 * (channels // num_heads) ** -0.5)
        wide = value_ratio * channels
        self.v = nn.Sequential(*conv_norm(channels, wide, 1), neuron())
        self.projection = nn.Sequential(*conv_norm(wide, channels, 1))


def sdt_v3(
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: Size,
    channels: tuple[int, int, int, int] = (32, 64, 128, 192),
    depths: tuple[int, int] = (6, 2),
    num_heads: int = 8,
    mlp_ratio: int = 4,
) -> nn.Sequential:
    """Build E-SpikeFormer, with 5, 10 or 19 million parameters.

    The authors train it with integers for one time step: `neuron` is `lambda: IntegerLIF(levels=4)`
    up to the factor 1/4 of its output, and `unroll_integer_spikes` gives the binary network.

    Shapes: `[B, C, H, W]` to `[B, num_classes]`, for any channels and size; tokens have 16 x 16
    pixels.

    Example::

        neuron = lambda: sf.IntegerLIF(levels=4)
        net = sf.Temporal(sf.models.sdt_v3_5m(neuron, 3, 10, (64, 64)))

    Args:
        neuron, in_channels, num_classes, size, channels, depths, num_heads, mlp_ratio: see
            `sdt_v2`. Blocks of the stages with attention begin with a separable convolution.

    Raises:
        ValueError: `num_heads` does not divide the channels.
    """
    for width in channels[2:]:
        check_heads(width, num_heads)
    width = channels[0] // 2
    layers = conv_norm(in_channels, width, 7, 2)
    for outputs, blocks in zip((width, *channels[:2]), (1, 1, 2), strict=True):
        if outputs != width:
            layers += [neuron(), *conv_norm(width, outputs, 3, 2)]
        width = outputs
        for _ in range(blocks):
            layers.append(_inverted(neuron, width, 7))
            layers.append(membrane_mlp(neuron, width, mlp_ratio * width, 3))
    for outputs, blocks, stride in zip(channels[2:], depths, (2, 1), strict=True):
        layers += [neuron(), *conv_norm(width, outputs, 3, stride)]
        width = outputs
        for _ in range(blocks):
            layers.append(_inverted(neuron, width, 3))
            layers.append(residual(neuron(), WideAttention(neuron, width, num_heads)))
            layers.append(membrane_mlp(neuron, width, mlp_ratio * width))
    return nn.Sequential(*layers, *spiking_head(neuron, width, num_classes))


def _inverted(neuron: MakeNeuron, channels: int, kernel: int) -> nn.Module:
    """Return an inverted separable convolution whose layers read spikes, with a shortcut."""
    wide = 2 * channels
    spread = conv_norm(wide, wide, kernel, groups=wide)
    layers = [*conv_norm(channels, wide, 1), neuron(), *spread, neuron()]
    return residual(neuron(), *layers, *conv_norm(wide, channels, 1))


def _convolutions(neuron: MakeNeuron, channels: int, mlp_ratio: int) -> list[nn.Module]:
    """Return an inverted separable 7 x 7 convolution and two of 3 x 3, both with shortcuts."""
    wide = 2 * channels
    spread = nn.Conv2d(wide, wide, 7, padding=3, groups=wide, bias=False)
    separable = [*conv_norm(channels, wide, 1), neuron(), spread, *conv_norm(wide, channels, 1)]
    return [
        residual(neuron(), *separable),
        membrane_mlp(neuron, channels, mlp_ratio * channels, 3),
    ]


def _separable(channels: int) -> list[nn.Module]:
    """Return a 1 x 1 and a separable 3 x 3 convolution, which can be merged for inference.

    The 1 x 1 convolution pads for the 3 x 3 one, so that the norm between them sees the padding,
    as the merged convolution needs it.
    """
    first = nn.Conv2d(channels, channels, 1, padding=1, bias=False)
    spread = nn.Conv2d(channels, channels, 3, groups=channels, bias=False)
    norms = [nn.BatchNorm2d(channels) for _ in range(2)]
    return [first, norms[0], spread, *conv_norm(channels, channels, 1), norms[1]]


def spiking_head(neuron: MakeNeuron, channels: int, num_classes: int) -> list[nn.Module]:
    """Return the average over tokens, the last neuron, and the linear layer."""
    average, flatten, linear = global_average(channels, num_classes)
    return [average, flatten, neuron(), linear]


sdt_v2_15m, sdt_v2_31m, sdt_v2_55m = (
    partial(sdt_v2, channels=channels)
    for channels in ((64, 128, 256, 360), (96, 192, 384, 480), (128, 256, 512, 640))
)
sdt_v3_5m, sdt_v3_10m, sdt_v3_19m = (
    partial(sdt_v3, channels=channels)
    for channels in ((32, 64, 128, 192), (48, 96, 192, 240), (64, 128, 256, 360))
)
