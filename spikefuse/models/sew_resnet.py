"""SEW-ResNets: residual blocks whose branches join as spikes.

Source: Fang et al., "Deep Residual Learning in Spiking Neural Networks", NeurIPS 2021. Theirs use
IF neurons with `detach_reset=True` and the arctan surrogate.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from spikefuse.models.blocks import MakeNeuron, projection
from spikefuse.models.resnet import EXPANSION, branch, residual_network, stem_layers

CONNECT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ADD": lambda branch, shortcut: branch + shortcut,
    "AND": lambda branch, shortcut: branch * shortcut,
    "IAND": lambda branch, shortcut: (1 - branch) * shortcut,
}


class SpikeElementWise(nn.Module):
    """`connect(branch(x), shortcut(x))`; both end in a neuron or pass spikes on."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module, connect: str) -> None:
        super().__init__()
        if connect not in CONNECT:
            raise ValueError(f"connect is {connect!r}: expected one of {', '.join(CONNECT)}")
        self.branch, self.shortcut, self.connect = branch, shortcut, connect

    def forward(self, x: Tensor) -> Tensor:
        return CONNECT[self.connect](self.branch(x), self.shortcut(x))


def sew_resnet18(
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: tuple[int, int],
    connect: str = "ADD",
    zero_init: bool = False,
    stem: str = "imagenet",
) -> nn.Sequential:
    """SEW-ResNet18.

    Shapes: `[B, C, H, W]` to `[B, num_classes]`, with any channels and size.

    Args:
        neuron, in_channels, num_classes, size: see `spikefuse.models`; `size` is not needed.
        connect: how a block joins branch a and shortcut b: "ADD" a + b, "AND" a * b, "IAND"
            (1 - a) * b. A sum of spikes may exceed 1.
        zero_init: begin with blocks that are the identity: the last norm of each branch has
            weight 0, so that its neuron is silent, and with "AND" bias 1, so that a neuron whose
            threshold is at most 1 always fires.
        stem: as in `resnet18`.

    Raises:
        ValueError: another connect function or stem.
    """
    return _sew_resnet(18, neuron, in_channels, num_classes, connect, zero_init, stem)


def sew_resnet34(
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: tuple[int, int],
    connect: str = "ADD",
    zero_init: bool = False,
    stem: str = "imagenet",
) -> nn.Sequential:
    """SEW-ResNet34; else as `sew_resnet18`."""
    return _sew_resnet(34, neuron, in_channels, num_classes, connect, zero_init, stem)


def sew_resnet50(
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    size: tuple[int, int],
    connect: str = "ADD",
    zero_init: bool = False,
    stem: str = "imagenet",
) -> nn.Sequential:
    """SEW-ResNet50, of bottlenecks; else as `sew_resnet18`."""
    return _sew_resnet(50, neuron, in_channels, num_classes, connect, zero_init, stem)


def _sew_resnet(
    depth: int,
    neuron: MakeNeuron,
    in_channels: int,
    num_classes: int,
    connect: str,
    zero_init: bool,
    stem: str,
) -> nn.Sequential:
    def block(width: int, channels: int, stride: int) -> nn.Module:
        layers = branch(depth, neuron, width, channels, stride)
        shortcut = projection(width, EXPANSION[depth] * channels, stride)
        if zero_init:
            norm = layers[-1]
            assert isinstance(norm, nn.BatchNorm2d)
            nn.init.zeros_(norm.weight)
            nn.init.constant_(norm.bias, float(connect == "AND"))
        if shortcut:
            shortcut.append(neuron())
        return SpikeElementWise(nn.Sequential(*layers, neuron()), nn.Sequential(*shortcut), connect)

    return residual_network(stem_layers(neuron, in_channels, stem), block, depth, num_classes)
