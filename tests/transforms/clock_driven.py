"""Classes of SpikingJelly 0.0.0.0.12, which is not installed with the other libraries: its names,
with its attributes and its arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import spikefuse as sf


def clock_driven(module: str):
    """Place a class in a module of SpikingJelly 0.0.0.0.12."""

    def place(cls):
        cls.__module__ = f"spikingjelly.clock_driven.{module}"
        return cls

    return place


@clock_driven("surrogate")
class ATan(nn.Module):
    def __init__(self, alpha: float = 2.0, spiking: bool = True) -> None:
        super().__init__()
        self.alpha, self.spiking = alpha, spiking
        self.spike = sf.surrogate.Arctan(alpha)

    def forward(self, x: Tensor) -> Tensor:
        return self.spike(x)


@clock_driven("neuron")
class LIFNode(nn.Module):
    def __init__(self, tau=2.0, decay_input=True, v_threshold=1.0, v_reset=0.0) -> None:
        super().__init__()
        self.tau, self.decay_input = tau, decay_input
        self.v_threshold, self.v_reset, self.detach_reset = v_threshold, v_reset, False
        self.surrogate_function = ATan()
        self.v = 0.0 if v_reset is None else v_reset

    def forward(self, x: Tensor) -> Tensor:
        change = (self.v - (self.v_reset or 0.0)) / self.tau
        self.v = self.v - change + (x / self.tau if self.decay_input else x)
        spike = self.surrogate_function(self.v - self.v_threshold)
        if self.v_reset is None:
            self.v = self.v - spike * self.v_threshold
        else:
            self.v = (1 - spike) * self.v + spike * self.v_reset
        return spike


@clock_driven("neuron")
class MultiStepLIFNode(LIFNode):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([super(MultiStepLIFNode, self).forward(step) for step in x])


@clock_driven("layer")
class SeqToANNContainer(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)).unflatten(0, x.shape[:2])


@clock_driven("layer")
class MultiStepContainer(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([super(MultiStepContainer, self).forward(step) for step in x])
