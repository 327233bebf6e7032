"""Spikformer: a vision transformer with attention between spikes and without softmax.

Source: Zhou et al., "Spikformer: When Spiking Neural Network Meets Transformer", ICLR 2023, and
the authors' published code for CIFAR, which uses LIF neurons with `decay=0.5`, `decay_input=True`
and `detach_reset=True`.

Tokens keep the shape of an image, [B, C, H, W]: a linear layer on tokens is a 1 x 1 convolution.
Convolutions have no bias, which batch norm would remove; with biases, Spikformer-4-384 has the
published 9.32 million parameters, without them 9.31.
"""

from __future__ import annotations

from torch import Tensor, nn

from spikefuse.models.blocks import MakeNeuron, Residual, Size, conv_norm


class SpikingSelfAttention(nn.Module):
    """`scale * q kᵀ v` per head with spikes q, k and v, followed by a neuron and a projection.

    The paper uses scale 0.125 and a neuron with threshold 0.5. Scale 0.25 with threshold 1, as in
    the other layers, is equivalent if the neuron is linear in its input.
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
        # Without softmax, v kᵀ can come first, which avoids a matrix of (H * W)² elements.
        y = (v @ k.transpose(-2, -1)) @ q
        return self.projection(self.neuron(self.scale * y.reshape(x.shape)))


def spikformer(
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: Size,
    depth: int = 4,
    channels: int = 384,
    num_heads: int = 12,
    mlp_ratio: int = 4,
    attention_scale: float = 0.25,
) -> nn.Sequential:
    """Build Spikformer-`depth`-`channels`, by default Spikformer-4-384 for CIFAR.

    Tokens have 4 x 4 pixels.

    Shapes: `[B, C, H, W]` to `[B, num_classes]`, for any channels and size.

    Args:
        neuron, in_channels, num_classes, size: see `spikefuse.models`; `size` is unused.
        depth: encoder blocks.
        channels: channels of a token, divisible by 8 and by `num_heads`.
        num_heads: number of attention heads.
        mlp_ratio: width of a block's hidden layer relative to `channels`.
        attention_scale: factor of the attention product; see `SpikingSelfAttention`.

    Raises:
        ValueError: `channels` is not divisible as required.
    """
    if channels % 8:
        raise ValueError(f"channels is {channels}: expected a multiple of 8")
    layers = _patches(neuron, in_channels, channels)
    hidden = mlp_ratio * channels
    for _ in range(depth):
        attention = SpikingSelfAttention(neuron, channels, num_heads, attention_scale)
        expand, reduce = conv_norm(channels, hidden, 1), conv_norm(hidden, channels, 1)
        layers.append(_residual(attention))
        layers.append(_residual(*expand, neuron(), *reduce, neuron()))
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)]
    return nn.Sequential(*layers, *head)


def _patches(neuron: MakeNeuron, in_channels: int, channels: int) -> list[nn.Module]:
    """Return four convolutions, the last two with max pooling, and the position embedding, which is
    also a convolution."""
    layers: list[nn.Module] = []
    width = in_channels
    for divisor in (8, 4, 2, 1):
        layers += [*conv_norm(width, channels // divisor), neuron()]
        width = channels // divisor
        if divisor <= 2:
            layers.append(nn.MaxPool2d(3, stride=2, padding=1))
    return [*layers, _residual(*conv_norm(channels, channels), neuron())]


def _residual(*layers: nn.Module) -> Residual:
    return Residual(nn.Sequential(*layers), nn.Identity(), nn.Identity())
