"""Layers shared by several architectures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from inspect import signature
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

MakeNeuron = Callable[[], nn.Module]
Size = tuple[int, int]


def pair(size: Size) -> Size:
    """Check the height and the width of the input."""
    if isinstance(size, str) or not hasattr(size, "__len__") or len(size) != 2:
        raise TypeError(f"size is {size!r}: expected height and width, such as (28, 28)")
    return size


def named(name: str, build: partial[nn.Sequential]) -> Callable[..., nn.Sequential]:
    """Return a function of `spikefuse.models` that calls a partial one, for `help` and pickle."""

    @wraps(build.func)
    def function(*args: Any, **kwargs: Any) -> nn.Sequential:
        return build(*args, **kwargs)

    attributes = {"__name__": name, "__qualname__": name, "__module__": "spikefuse.models"}
    for attribute, value in {**attributes, "__signature__": signature(build)}.items():
        setattr(function, attribute, value)
    return function


def conv_norm(
    in_channels: int,
    channels: int,
    kernel: int = 3,
    stride: int = 1,
    norm: bool = True,
    groups: int = 1,
) -> list[nn.Module]:
    """Return a convolution and its batch norm; without `norm`, a convolution with a bias.

    Stride 2 halves the size, rounded up.
    """
    padding = kernel // 2
    layer = nn.Conv2d(in_channels, channels, kernel, stride, padding, groups=groups, bias=not norm)
    return [layer, nn.BatchNorm2d(channels)] if norm else [layer]


def max_pool() -> nn.Module:
    """Return a 3 x 3 max pooling with stride 2, which halves the size, rounded up."""
    return nn.MaxPool2d(3, stride=2, padding=1)


def global_average(channels: int, num_classes: int, bias: bool = True) -> list[nn.Module]:
    """Return the average over an image and the linear layer that reads it."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes, bias)]


def perceptron(neuron: MakeNeuron, widths: Sequence[int], norm: bool) -> list[nn.Module]:
    """Return linear layers of the given widths, from the input to the output.

    Each but the last, which is read at every time step, is followed by batch norm and a neuron;
    without `norm` it has a bias instead of the batch norm.
    """
    layers: list[nn.Module] = []
    for width, features in pairwise(widths[:-1]):
        layers.append(nn.Linear(width, features, bias=not norm))
        layers += [nn.BatchNorm1d(features), neuron()] if norm else [neuron()]
    return [*layers, nn.Linear(widths[-2], widths[-1])]


class Residual(nn.Module):
    """`activation(branch(x) + shortcut(x))`."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut, self.activation = branch, shortcut, activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.branch(x) + self.shortcut(x))


def residual(*layers: nn.Module) -> Residual:
    """Return `x + layers(x)`."""
    return Residual(nn.Sequential(*layers), nn.Identity(), nn.Identity())
