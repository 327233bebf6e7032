"""QKFormer: a hierarchical spiking transformer whose first stages attend with q and k only.

Source: Zhou et al., "QKFormer: Hierarchical Spiking Transformer using Q-K Attention", NeurIPS 2024,
and the authors' published code, which uses LIF neurons with `decay=0.5`, `decay_input=True` and
`detach_reset=True`. Tokens keep the shape of an image, and convolutions before a norm have no bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from spikefuse.models.blocks import (
    MakeNeuron,
    Residual,
    Size,
    conv_norm,
    global_average,
    max_pool,
    residual,
)
from spikefuse.models.spikformer import (
    DOUBLED,
    SpikingSelfAttention,
    check_heads,
    pointwise,
    spiking_mlp,
    split_heads,
)

# Whether max pooling follows the first convolution, and each convolution of the three stages.
POOLED: dict[str, tuple[bool, Sequence[Sequence[bool]]]] = {
    "imagenet": (True, ((True, False),) * 3),
    "cifar": (False, ((False,), (False, True), (False, True))),
}


class TokenAttention(nn.Module):
    """`projection(neuron(Σ q) k)`: per head, q selects the tokens of k that pass.

    The sum is over the channels of a head; q and k are spikes. The sum is doubled, see `DOUBLED`.
    """

    def __init__(self, neuron: MakeNeuron, channels: int, num_heads: int) -> None:
        super().__init__()
        check_heads(channels, num_heads)
        self.q, self.k = (nn.Sequential(*pointwise(channels), neuron()) for _ in range(2))
        self.neuron = neuron()
        self.projection = nn.Sequential(*pointwise(channels))
        self.num_heads = num_heads

    def forward(self, x: Tensor) -> Tensor:
        q, k = (split_heads(layers(x), self.num_heads) for layers in (self.q, self.k))
        chosen = self.neuron(DOUBLED * q.sum(2, keepdim=True))
        return self.projection((chosen * k).reshape_as(x))


def qkformer(
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: Size,
    depths: tuple[int, int, int] = (1, 1, 2),
    channels: int = 384,
    num_heads: int = 8,
    mlp_ratio: int = 4,
    stem: str = "cifar",
) -> nn.Sequential:
    """Build QKFormer, HST-`sum(depths)`-`channels`; `qkformer` is HST-4-384 for CIFAR.

    Shapes: `[B, C, H, W]` to `[B, num_classes]`, for any channels and size.

    Example::

        net = sf.Temporal(sf.models.qkformer(sf.LIF, 3, 10, (32, 32), channels=192))

    Args:
        neuron, in_channels, num_classes, size: see `spikefuse.models`; `size` is unused.
        depths: blocks of the three stages. The first two have `TokenAttention`, the last has
            `SpikingSelfAttention`.
        channels: channels of the last stage; the first two have a quarter and half of them.
        num_heads: attention heads, a divisor of a quarter of `channels`.
        mlp_ratio: width of a block's hidden layer relative to its channels.
        stem: "imagenet", where tokens of the three stages have 4, 8 and 16 rows of pixels, or
            "cifar", where they have 1, 2 and 4.

    Raises:
        ValueError: another stem, or `channels` is not divisible as required.
    """
    if stem not in POOLED:
        raise ValueError(f"stem is {stem!r}: expected imagenet or cifar")
    if channels % 8:
        raise ValueError(f"channels is {channels}: expected a multiple of 8")
    first_pooled, stages = POOLED[stem]
    width = channels // 8
    layers = [*conv_norm(in_channels, width), *[max_pool()] * first_pooled, neuron()]
    for index, (depth, pooled) in enumerate(zip(depths, stages, strict=True)):
        layers.append(_patches(neuron, width, pooled))
        width *= 2
        attend = SpikingSelfAttention if index == 2 else TokenAttention
        for _ in range(depth):
            layers.append(residual(attend(neuron, width, num_heads), neuron()))
            layers.append(spiking_mlp(neuron, width, mlp_ratio * width))
    return nn.Sequential(*layers, *global_average(channels, num_classes))


def _patches(neuron: MakeNeuron, width: int, pooled: Sequence[bool]) -> nn.Module:
    """Return convolutions that double the channels, and a projection with a neuron beside them."""
    layers: list[nn.Module] = []
    in_channels = width
    for pool in pooled:
        layers += [*conv_norm(in_channels, 2 * width), *[max_pool()] * pool, neuron()]
        in_channels = 2 * width
    shortcut = [*conv_norm(width, 2 * width, 1, 2 ** sum(pooled)), neuron()]
    return Residual(nn.Sequential(*layers), nn.Sequential(*shortcut), nn.Identity())


# For ImageNet.
qkformer_10_384, qkformer_10_512, qkformer_10_768 = (
    partial(
        qkformer, depths=(1, 2, 7), channels=channels, num_heads=channels // 64, stem="imagenet"
    )
    for channels in (384, 512, 768)
)
