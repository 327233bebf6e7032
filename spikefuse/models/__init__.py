"""Architectures: networks written for one time step, to be run by `spikefuse.Temporal`.

Every builder takes the same arguments:

    neuron: makes one neuron module per call, such as `lambda: spikefuse.LIF(decay=0.5)`.
    in_channels: channels of the input.
    num_classes: outputs of the last layer, which is linear and does not spike.
    size: height and width of the input.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from spikefuse.models.conv import conv
from spikefuse.models.mlp import mlp
from spikefuse.models.resnet import resnet18

Builder = Callable[[Callable[[], nn.Module], int, int, tuple[int, int]], nn.Module]

MODELS: dict[str, Builder] = {"mlp": mlp, "conv": conv, "resnet18": resnet18}

__all__ = ["MODELS", "Builder", "conv", "mlp", "resnet18"]
