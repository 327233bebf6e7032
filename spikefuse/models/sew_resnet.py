"""SEW-ResNets: residual blocks that combine spikes.

Source: Fang et al., "Deep Residual Learning in Spiking Neural Networks", NeurIPS 2021. It uses
IF neurons with `detach_reset=True` and the arctan surrogate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from spikefuse.models.blocks import MakeNeuron, Size, projection
from spikefuse.models.resnet import EXPANSION, branch, residual_network, stem_layers

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


class SewOptions(NamedTuple):
    """Options of a SEW-ResNet; see `sew_resnet18`."""

    connect: str
    zero_init: bool
    stem: str


def sew_resnet18(
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: Size,
    connect: str = "ADD",
    zero_init: bool = False,
    stem: str = "imagenet",
) -> nn.Sequential:
    """Build a SEW-ResNet18.

    Shapes: `[B, C, H, W]` to `[B, num_classes]`, for any channels and size.

    Args:
        neuron, in_channels, num_classes, size: see `spikefuse.models`; `size` is unused.
        connect: how a block combines branch a and shortcut b: "ADD" a + b, "AND" a * b, "IAND"
            (1 - a) * b. A sum of spikes may exceed 1.
        zero_init: initialize blocks to the identity: the last norm of each branch has weight 0, so
            that its neuron is silent, and with "AND" bias 1, so that a neuron with a threshold of
            at most 1 always fires.
        stem: as in `resnet18`.

    Raises:
        ValueError: another connect function or stem.
    """
    options = SewOptions(connect, zero_init, stem)
    return _sew_resnet(18, neuron, in_channels, num_classes, options)


def sew_resnet34(
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: Size,
    connect: str = "ADD",
    zero_init: bool = False,
    stem: str = "imagenet",
) -> nn.Sequential:
    """Build a SEW-ResNet34; see `sew_resnet18`."""
    options = SewOptions(connect, zero_init, stem)
    return _sew_resnet(34, neuron, in_channels, num_classes, options)


def sew_resnet50(
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: Size,
    connect: str = "ADD",
    zero_init: bool = False,
    stem: str = "imagenet",
) -> nn.Sequential:
    """Build a SEW-ResNet50 of bottlenecks; see `sew_resnet18`."""
    options = SewOptions(connect, zero_init, stem)
    return _sew_resnet(50, neuron, in_channels, num_classes, options)


def _sew_resnet(
    depth: int, neuron: MakeNeuron, in_channels: int, num_classes: int, options: SewOptions
) -> nn.Sequential:
    connect = options.connect

    def block(width: int, channels: int, stride: int) -> nn.Module:
        layers = branch(depth, neuron, width, channels, stride)
        shortcut = projection(width, EXPANSION[depth] * channels, stride)
        if options.zero_init:
            norm = layers[-1]
            assert isinstance(norm, nn.BatchNorm2d)
            nn.init.zeros_(norm.weight)
            nn.init.constant_(norm.bias, float(connect == "AND"))
        if shortcut:
            shortcut.append(neuron())
        return SpikeElementWise(nn.Sequential(*layers, neuron()), nn.Sequential(*shortcut), connect)

    stem = stem_layers(neuron, in_channels, options.stem)
    return residual_network(stem, block, depth, num_classes)
