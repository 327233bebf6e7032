"""SEW-ResNets: residual blocks that combine spikes.

Source: Fang et al., "Deep Residual Learning in Spiking Neural Networks", NeurIPS 2021. It uses
IF neurons with `detach_reset=True` and the arctan surrogate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from spikefuse.models.blocks import MakeNeuron, Size
from spikefuse.models.resnet import branch, projection, residual_network, stem_layers

CONNECT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ADD": lambda branch, shortcut: branch + shortcut,
    "AND": lambda branch, shortcut: branch * shortcut,
    "IAND": lambda branch, shortcut: (1 - branch) * shortcut,
}


class SpikeElementWise(nn.Module):
    """`connect(branch(x), shortcut(x))`, where both are spikes."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module, connect: str) -> None:
        super().__init__()
        if connect not in CONNECT:
            raise ValueError(f"connect is {connect!r}: expected one of {', '.join(CONNECT)}")
        self.branch, self.shortcut, self.connect = branch, shortcut, connect

    def forward(self, x: Tensor) -> Tensor:
        return CONNECT[self.connect](self.branch(x), self.shortcut(x))


def sew_resnet(
    depth: int,
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: Size,
    connect: str = "ADD",
    zero_init: bool = False,
    stem: str = "imagenet",
) -> nn.Sequential:
    """Build a SEW-ResNet.

    Shapes: `[B, C, H, W]` to `[B, num_classes]`, for any channels and size.

    Example::

        net = sf.Temporal(sf.models.sew_resnet18(sf.LIF, 3, 10, (32, 32), stem="cifar"))

    Args:
        depth: 18 or 34, or 50, 101 or 152, which have bottlenecks.
        neuron, in_channels, num_classes, size: see `spikefuse.models`; `size` is unused.
        connect: how a block combines branch a and shortcut b: "ADD" a + b, "AND" a * b, "IAND"
            (1 - a) * b. A sum of spikes may exceed 1.
        zero_init: initialize blocks to the identity: the last norm of each branch has weight 0, so
            that its neuron is silent, and with "AND" bias 1, so that a neuron with a threshold of
            at most 1 always fires.
        stem: as in `resnet`.

    Raises:
        ValueError: another connect function or stem.
    """

    def block(width: int, channels: int, stride: int) -> nn.Module:
        layers = branch(depth, neuron, width, channels, stride)
        shortcut = projection(depth, width, channels, stride)
        if zero_init:
            norm = layers[-1]
            assert isinstance(norm, nn.BatchNorm2d)
            nn.init.zeros_(norm.weight)
            nn.init.constant_(norm.bias, float(connect == "AND"))
        if shortcut:
            shortcut.append(neuron())
        return SpikeElementWise(nn.Sequential(*layers, neuron()), nn.Sequential(*shortcut), connect)

    return residual_network(stem_layers(neuron, in_channels, stem), block, depth, num_classes)


sew_resnet18, sew_resnet34, sew_resnet50, sew_resnet101, sew_resnet152 = (
    partial(sew_resnet, depth) for depth in (18, 34, 50, 101, 152)
)
