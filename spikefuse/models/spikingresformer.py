"""SpikingResformer: a spiking residual network with attention between spikes and patches.

Source: Shi et al., "SpikingResformer: Bridging ResNet and Vision Transformer in Spiking Neural
Networks", CVPR 2024, and the authors' published code, which uses LIF neurons with `decay=0.5`,
`decay_input=True` and `detach_reset=True`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from spikefuse.models.blocks import MakeNeuron, Size, conv_norm, global_average, max_pool, residual
from spikefuse.models.spikformer import check_heads, split_heads
from spikefuse.nn.symbolic import leaf

# Rows of tokens per patch of the attention, and blocks, of the three stages.
PATCHES, DEPTHS = (4, 2, 1), (1, 2, 3)
GROUP = 64  # channels of a group of the 3 x 3 convolutions
MOMENTUM = 0.001


class SpikeScale(nn.Module):
    """`1 / sqrt(f d)`, where f is the running mean of the firing rate of each head.

    A product of spikes with d terms of variance 1 then has variance 1 (equation 11 of the paper).
    """

    rate: Tensor

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.register_buffer("rate", torch.zeros(num_heads, 1, 1))

    @leaf
    def forward(self, spikes: Tensor) -> Tensor:
        """Return `[heads, 1, 1]` for spikes `[B, heads, d, ...]`; update f in training."""
        if self.training:
            rate = spikes.detach().mean((0, 2, 3), dtype=torch.float32).view_as(self.rate)
            running = torch.lerp(self.rate, rate, MOMENTUM)
            self.rate.copy_(torch.where(self.rate == 0, rate, running))
        # A head that never fired has a scale, too.
        return (self.rate * spikes.shape[2]).clamp(min=1e-6).rsqrt().to(spikes.dtype)


class DualSpikeAttention(nn.Module):
    """`projection(neuron(scale v neuron(scale kᵀ x)))` per head, with spikes x.

    k and v are membrane input: one convolution of x over patches, and a norm.
    """

    def __init__(self, neuron: MakeNeuron, channels: int, num_heads: int, patch: int) -> None:
        super().__init__()
        check_heads(channels, num_heads)
        self.embedding = nn.Conv2d(channels, 2 * channels, patch, patch, bias=False)
        self.norm = nn.BatchNorm2d(2 * channels)
        self.attention_scale, self.value_scale = SpikeScale(num_heads), SpikeScale(num_heads)
        self.attention_neuron, self.neuron = neuron(), neuron()
        self.projection = nn.Sequential(*conv_norm(channels, channels, 1))
        self.num_heads, self.width = num_heads, channels // num_heads

    def forward(self, x: Tensor) -> Tensor:
        spikes, width = split_heads(x, self.num_heads), self.width
        both = split_heads(self.norm(self.embedding(x)), self.num_heads)
        k, v = both[:, :, :width], both[:, :, width:]
        scale = self.attention_scale(spikes)
        attention = self.attention_neuron(scale * (k.transpose(-2, -1) @ spikes))
        scale = self.value_scale(attention)
        return self.projection(self.neuron((scale * (v @ attention)).reshape_as(x)))


def spikingresformer(
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: Size,
    channels: tuple[int, int, int] = (64, 192, 384),
    stem: str = "imagenet",
) -> nn.Sequential:
    """Build SpikingResformer, of size Ti, S, M or L.

    Shapes: `[B, C, H, W]` to `[B, num_classes]`. H and W are at least 16 with the stem for
    ImageNet, otherwise 4.

    Example::

        net = sf.Temporal(sf.models.spikingresformer_ti(sf.LIF, 3, 10, (64, 64)))

    Args:
        neuron, in_channels, num_classes, size: see `spikefuse.models`; `size` is unused.
        channels: channels of the three stages, multiples of 64, the channels of a head.
        stem: "imagenet", which divides the size by 4, or "cifar", which keeps it.

    Raises:
        ValueError: another stem, or channels that are not multiples of 64.
    """
    if stem not in ("imagenet", "cifar"):
        raise ValueError(f"stem is {stem!r}: expected imagenet or cifar")
    for width in channels:
        if width % GROUP:
            raise ValueError(f"channels is {width} in a stage: expected a multiple of {GROUP}")
    width = channels[0]
    layers = conv_norm(in_channels, width)
    if stem == "imagenet":
        layers = [*conv_norm(in_channels, width, 7, 2), max_pool()]
    for outputs, patch, blocks in zip(channels, PATCHES, DEPTHS, strict=True):
        if patch < PATCHES[0]:
            layers += [neuron(), *conv_norm(width, outputs, 3, 2)]
        width = outputs
        for _ in range(blocks):
            attention = DualSpikeAttention(neuron, width, width // GROUP, patch)
            layers += [residual(neuron(), attention), _feedforward(neuron, width)]
    return nn.Sequential(*layers, *global_average(width, num_classes, bias=False))


def _feedforward(neuron: MakeNeuron, channels: int) -> nn.Module:
    """Return a group-wise feed-forward network, four times as wide inside, with shortcuts."""
    wide = 4 * channels
    return residual(
        *(neuron(), *conv_norm(channels, wide, 1)),
        residual(neuron(), *conv_norm(wide, wide, groups=wide // GROUP)),
        *(neuron(), *conv_norm(wide, channels, 1)),
    )


spikingresformer_ti, spikingresformer_s, spikingresformer_m, spikingresformer_l = (
    partial(spikingresformer, channels=channels)
    for channels in ((64, 192, 384), (64, 256, 512), (64, 384, 768), (128, 512, 1024))
)
