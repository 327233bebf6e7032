"""Spikformer: a vision transformer with attention between spikes and without softmax.

Source: Zhou et al., "Spikformer: When Spiking Neural Network Meets Transformer", ICLR 2023, and
the authors' published code, which uses LIF neurons with `decay=0.5`, `decay_input=True` and
`detach_reset=True`.

Tokens keep the shape of an image, [B, C, H, W]: a linear layer on tokens is a 1 x 1 convolution.
Convolutions have no bias, which batch norm would remove; with biases, Spikformer-4-384 has the
published 9.32 million parameters, without them 9.31.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from spikefuse.models.blocks import MakeNeuron, Size, conv_norm, global_average, max_pool, residual

# The papers halve the threshold of a neuron that receives spike counts. Doubling its input gives
# the same spikes if the neuron is linear in its input.
DOUBLED = 2.0


def pointwise(channels: int) -> list[nn.Module]:
    """Return a linear layer on tokens and its norm."""
    return conv_norm(channels, channels, 1)


def check_heads(channels: int, num_heads: int) -> None:
    if channels % num_heads:
        raise ValueError(f"num_heads is {num_heads}: expected a divisor of the {channels} channels")


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Reshape tokens `[B, C, H, W]` to `[B, num_heads, C / num_heads, H * W]`."""
    return x.flatten(2).unflatten(1, (num_heads, -1))


class SpikingSelfAttention(nn.Module):
    """`scale * q kᵀ v` per head with spikes q, k and v, followed by a neuron and a projection.

    The paper uses scale 0.125 and a neuron with threshold 0.5. Scale 0.25 with threshold 1, as in
    the other layers, is equivalent if the neuron is linear in its input.

    Args:
        projection: returns the linear layer and the norm of q, k, v and of the output.
    """

    def __init__(
        self,
        neuron: MakeNeuron,
        channels: int,
        num_heads: int,
        scale: float = DOUBLED * 0.125,
        projection: Callable[[int], list[nn.Module]] = pointwise,
    ) -> None:
        super().__init__()
        check_heads(channels, num_heads)
        self.q, self.k, self.v = (nn.Sequential(*projection(channels), neuron()) for _ in range(3))
        self.neuron = neuron()
        self.projection = nn.Sequential(*projection(channels))
        self.num_heads, self.scale = num_heads, scale

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layers(x), self.num_heads) for layers in (self.q, self.k, self.v))
        # Without softmax, v kᵀ can come first, which avoids a matrix of (H * W)² elements.
        y = (v @ k.transpose(-2, -1)) @ q
        y = self.scale * y.reshape(len(x), -1, *x.shape[2:])
        return self.projection(self.neuron(y))


def spiking_mlp(neuron: MakeNeuron, channels: int, hidden: int) -> nn.Module:
    """Return the two layers of a block, whose output spikes, with a shortcut."""
    expand, reduce = conv_norm(channels, hidden, 1), conv_norm(hidden, channels, 1)
    return residual(*expand, neuron(), *reduce, neuron())


def spikformer(
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: Size,
    depth: int = 4,
    channels: int = 384,
    num_heads: int = 12,
    mlp_ratio: int = 4,
    attention_scale: float = DOUBLED * 0.125,
    num_poolings: int = 2,
) -> nn.Sequential:
    """Build Spikformer-`depth`-`channels`; `spikformer` is 4-384 for CIFAR.

    Shapes: `[B, C, H, W]` to `[B, num_classes]`, for any channels and size.

    Example::

        net = sf.Temporal(sf.models.spikformer(sf.LIF, 3, 10, (32, 32), depth=2))

    Args:
        neuron, in_channels, num_classes, size: see `spikefuse.models`; `size` is unused.
        depth: encoder blocks.
        channels: channels of a token, divisible by 8 and by `num_heads`.
        num_heads: number of attention heads.
        mlp_ratio: width of a block's hidden layer relative to `channels`.
        attention_scale: factor of the attention product; see `SpikingSelfAttention`.
        num_poolings: max poolings among the first layers, from 0 to 4: a token has
            `2**num_poolings` rows and columns of pixels.

    Raises:
        ValueError: `channels` is not divisible as required.
    """
    layers = patches(neuron, in_channels, channels, num_poolings)
    # The position embedding is a convolution, too.
    layers.append(residual(*conv_norm(channels, channels), neuron()))
    for _ in range(depth):
        attention = SpikingSelfAttention(neuron, channels, num_heads, attention_scale)
        layers.append(residual(attention, neuron()))
        layers.append(spiking_mlp(neuron, channels, mlp_ratio * channels))
    return nn.Sequential(*layers, *global_average(channels, num_classes))


def patches(
    neuron: MakeNeuron, in_channels: int, channels: int, num_poolings: int
) -> list[nn.Module]:
    """Return four convolutions with norm and neuron, the last of them with max pooling.

    Raises:
        ValueError: `channels` is not divisible by 8.
    """
    if channels % 8:
        raise ValueError(f"channels is {channels}: expected a multiple of 8")
    layers: list[nn.Module] = []
    width = in_channels
    for index, divisor in enumerate((8, 4, 2, 1)):
        layers += [*conv_norm(width, channels // divisor), neuron()]
        width = channels // divisor
        if index >= 4 - num_poolings:
            layers.append(max_pool())
    return layers


# For ImageNet.
spikformer_8_384, spikformer_8_512, spikformer_8_768 = (
    partial(spikformer, depth=8, channels=channels, num_heads=8, num_poolings=4)
    for channels in (384, 512, 768)
)
