"""Leaky integrate-and-fire with multi-level spikes."""

from __future__ import annotations

import torch
from torch import Tensor

from spikefuse.neurons.definition import Neuron, State, States
from spikefuse.neurons.lif import leaky
from spikefuse.neurons.parameters import Value, flag, fraction, positive, whole


class IntegerLIF(Neuron):
    """LIF neuron that emits integers from 0 to `levels` (I-LIF).

    Equation, per time step, with potential `v`, input `x`, output `s`::

        h = decay * v + x
        u = clamp(h / threshold, 0, levels)
        s = floor(u), plus 1 where u - floor(u) >= 1/2
        v = h - threshold * s

    The derivative of `s` with respect to `h / threshold` is 1 on [0, levels] and 0 elsewhere
    (straight-through estimator).

    Shapes: `x`, output: `[T, B, ...]` (float32, bfloat16 or float16); `v`: `[B, ...]` (float32).

    Source: Luo et al., "Integer-Valued Training and Spike-Driven Inference Spiking Neural
    Network for High-performance and Energy-efficient Object Detection", ECCV 2024.

    Example::

        neuron = sf.IntegerLIF(levels=4)
        y = neuron(4 * torch.rand(8, 32, 128))  # 0, 1, 2, 3 or 4

    Args:
        decay: factor of the previous potential, in [0, 1].
        threshold: potential per level, positive.
        levels: the largest output, at least 1.
        detach_reset: stop gradients through the reset.

    Raises:
        TypeError, ValueError: a parameter has the wrong type or is out of range.
    """

    v = State()

    def __init__(
        self,
        decay: Value = 0.25,
        threshold: Value = 1.0,
        levels: int = 4,
        *,
        detach_reset: bool = False,
    ) -> None:
        super().__init__()
        self.decay = self._option("decay", decay, fraction)
        self.threshold = self._option("threshold", threshold, positive)
        self.levels = self._option("levels", levels, whole, 1)
        self.detach_reset = self._option("detach_reset", detach_reset, flag)

    def step(self, x: Tensor, v: Tensor) -> tuple[Tensor, States]:
        h = leaky(x, v, self.decay, False)
        self.expose(h=h)
        u = h / self.threshold
        clipped = torch.clamp(torch.clamp(u, min=0.0), max=self.levels).detach()
        # The derivative of clamp at its bounds depends on the version of PyTorch.
        u = torch.where(clipped == u, u, clipped)
        whole = torch.floor(clipped)
        rounded = whole + (clipped - whole >= 0.5)
        # The difference is 0, so that adding it rounds nothing, and has the derivative of u.
        s = rounded + (u - u.detach())
        r = s.detach() if self.detach_reset else s
        return s, (h - self.threshold * r,)
