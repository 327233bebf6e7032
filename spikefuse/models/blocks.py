"""Layers shared by several architectures."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

MakeNeuron = Callable[[], nn.Module]
Size = tuple[int, int]

# All networks end in a linear layer without a neuron, whose output is read at every time step.


def conv_norm(in_channels: int, channels: int, kernel: int = 3, stride: int = 1) -> list[nn.Module]:
    """Return a convolution without bias and its batch norm; stride 2 halves sizes, rounded up."""
    padding = kernel // 2
    return [
        nn.Conv2d(in_channels, channels, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(channels),
    ]


def linear_norm(in_features: int, features: int) -> list[nn.Module]:
    """Return a linear layer without bias and its batch norm."""
    return [nn.Linear(in_features, features, bias=False), nn.BatchNorm1d(features)]


class Residual(nn.Module):
    """`activation(branch(x) + shortcut(x))`."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut, self.activation = branch, shortcut, activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.branch(x) + self.shortcut(x))


def projection(in_channels: int, channels: int, stride: int) -> list[nn.Module]:
    """Return the layers of a shortcut; none if the shape stays the same."""
    if stride == 1 and in_channels == channels:
        return []
    return conv_norm(in_channels, channels, 1, stride)
