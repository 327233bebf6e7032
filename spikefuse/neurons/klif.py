"""k-based leaky integrate-and-fire."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spikefuse.neurons.checks import integer
from spikefuse.neurons.definition import States
from spikefuse.neurons.firing import Reset
from spikefuse.neurons.lif import LIF
from spikefuse.neurons.parameters import Value, flag, positive
from spikefuse.neurons.surrogate import Surrogate


class KLIF(LIF):
    """LIF neuron that applies `relu(k * .)` to its potential before it fires; `k` is learned.

    Equation, per time step, with potential `v`, input `x`, spike `s`::

        f = relu(k * h), with the h of `LIF`
        s = 1 if f >= threshold else 0
        v = f * (1 - s) + v_reset * s           (hard reset)
        v = f - threshold * s                   (soft reset)

    With `scale_reset`, `f / k` and `threshold / k` replace `f` and `threshold` in the reset, so
    that `k` does not scale the state.

    Shapes: `x`, spikes: `[T, B, ...]` (float32, bfloat16 or float16); `v`: `[B, ...]` (float32).

    Source: Jiang and Zhang, "KLIF: An Optimized Spiking Neuron Unit for Tuning Surrogate
    Gradient Slope and Membrane Potential", arXiv:2302.09238, 2023.

    Example::

        neuron = sf.KLIF(channels=128)  # a learned k per channel
        spikes = neuron(torch.rand(8, 32, 128))

    Args:
        decay: factor of the previous potential, in [0, 1].
        threshold, v_reset, reset, detach_reset, surrogate: see `Firing`.
        k: value before training, a positive number; or a tensor or `Learnable`, used unchanged.
        channels: number of channels (dim 2 of `[T, B, C, ...]`), each with its own k; None for a
            single k.
        scale_reset: divide by `k` before the reset.
        decay_input: see `LIF`.

    Raises:
        TypeError, ValueError: a parameter has the wrong type or is out of range.
    """

    def __init__(
        self,
        decay: Value = 0.5,
        threshold: Value = 1.0,
        k: Value = 1.0,
        channels: int | None = None,
        scale_reset: bool = False,
        *,
        decay_input: bool = False,
        v_reset: Value = 0.0,
        reset: Reset = "hard",
        detach_reset: bool = False,
        surrogate: Surrogate | None = None,
    ) -> None:
        super().__init__(
            decay,
            threshold,
            decay_input=decay_input,
            v_reset=v_reset,
            reset=reset,
            detach_reset=detach_reset,
            surrogate=surrogate,
        )
        self.k = self._option("k", k, positive)
        if isinstance(self.k, float):
            shape = () if channels is None else (integer("channels", channels),)
            self.k = nn.Parameter(torch.full(shape, self.k))
        self.scale_reset = self._option("scale_reset", scale_reset, flag)

    def step(self, x: Tensor, v: Tensor) -> tuple[Tensor, States]:
        f = torch.relu(self.k * self.charge(x, v))
        self.expose(h=f)
        s = self.surrogate(f - self.threshold)
        if self.scale_reset:
            return s, (self.after(f / self.k, s, self.threshold / self.k),)
        return s, (self.after(f, s, self.threshold),)
