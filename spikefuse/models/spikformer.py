"""Spikformer: a vision transformer whose attention multiplies spikes and has no softmax.

Source: Zhou et al., "Spikformer: When Spiking Neural Network Meets Transformer", ICLR 2023, and
the authors' published code for CIFAR; theirs are LIF neurons with `decay=0.5`,
`decay_input=True` and `detach_reset=True`.

Tokens stay an image [B, C, H, W] throughout: a linear layer on tokens is a 1 x 1 convolution, and
channels are dim 2 of what a neuron receives, as elsewhere. These have no bias, which the batch norm
after them would take away again; with theirs, Spikformer-4-384 has the published 9.32 million
parameters, without 9.31.
"""

from __future__ import annotations

from torch import Tensor, nn

from spikefuse.models.blocks import MakeNeuron, Residual, conv_norm


class SpikingSelfAttention(nn.Module):
    """`q kᵀ v` per head, scaled, on spikes q, k and v; then a neuron and a projection.

    The paper's product has the scale 0.125 and a neuron of threshold 0.5 after it; the same
    neuron as everywhere, at threshold 1, spikes alike with the scale 0.25, if its input charges
    it linearly.
    """

    def __init__(self, neuron: MakeNeuron, channels: int, num_heads: int, scale: float) -> None:
        super().__init__()
        if channels % num_heads:
            raise ValueError(
                f"num_heads is {num_heads}: expected a divisor of the {channels} channels"
            )
        self.q, self.k, self.v = (
            nn.Sequential(*conv_norm(channels, channels, 1), neuron()) for _ in range(3)
        )
        self.neuron = neuron()
        self.projection = nn.Sequential(*conv_norm(channels, channels, 1), neuron())
        self.num_heads, self.scale = num_heads, scale

    def forward(self, x: Tensor) -> Tensor:
        # [B, heads, C / heads, H * W]
        q, k, v = (
            layers(x).flatten(2).unflatten(1, (self.num_heads, -1))
            for layers in (self.q, self.k, self.v)
        )
        # Without a softmax the product may start with k and v, which takes no square of H * W.
        y = (v @ k.transpose(-2, -1)) @ q
        return self.projection(self.neuron(self.scale * y.reshape(x.shape)))


def spikformer(
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: tuple[int, int],
    depth: int = 4,
    channels: int = 384,
    num_heads: int = 12,
    mlp_ratio: int = 4,
    attention_scale: float = 0.25,
) -> nn.Sequential:
    """Spikformer-`depth`-`channels`, by default Spikformer-4-384 for CIFAR: tokens of 4 x 4 pixels.

    Shapes: `[B, C, H, W]` to `[B, num_classes]`, with any channels and size.

    Args:
        neuron, in_channels, num_classes, size: see `spikefuse.models`; `size` is not needed.
        depth: encoder blocks.
        channels: of a token; divisible by 8 and by `num_heads`.
        num_heads: heads of the attention.
        mlp_ratio: width of a block's hidden layer over `channels`.
        attention_scale: factor of the attention's product; see `SpikingSelfAttention`.

    Raises:
        ValueError: `channels` cannot be divided so.
    """
    if channels % 8:
        raise ValueError(f"channels is {channels}: expected a multiple of 8")
    layers = _patches(neuron, in_channels, channels)
    hidden = mlp_ratio * channels
    for _ in range(depth):
        attention = SpikingSelfAttention(neuron, channels, num_heads, attention_scale)
        layers.append(_added(attention))
        layers.append(
            _added(
                *conv_norm(channels, hidden, 1),
                neuron(),
                *conv_norm(hidden, channels, 1),
                neuron(),
            )
        )
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)]
    return nn.Sequential(*layers, *head)


def _patches(neuron: MakeNeuron, in_channels: int, channels: int) -> list[nn.Module]:
    """Four convolutions, the last two with max pooling, and the position embedding, which is a
    convolution too."""
    layers: list[nn.Module] = []
    width = in_channels
    for divisor in (8, 4, 2, 1):
        layers += [*conv_norm(width, channels // divisor), neuron()]
        width = channels // divisor
        if divisor <= 2:
            layers.append(nn.MaxPool2d(3, stride=2, padding=1))
    return [*layers, _added(*conv_norm(channels, channels), neuron())]


def _added(*layers: nn.Module) -> Residual:
    return Residual(nn.Sequential(*layers), nn.Identity(), nn.Identity())
