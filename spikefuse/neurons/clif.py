"""Complementary leaky integrate-and-fire."""

from __future__ import annotations

import torch
from torch import Tensor

from spikefuse.neurons.definition import State, States
from spikefuse.neurons.lif import LIF
from spikefuse.neurons.parameters import Value
from spikefuse.neurons.surrogate import Surrogate


class CLIF(LIF):
    """Complementary LIF neuron: a second potential `m`, raised by spikes, deepens the reset.

    Equation, per time step, with potential `v`, complementary potential `m`, input `x`, spike
    `s`::

        h = decay * v + x
        s = 1 if h >= threshold else 0
        m = m * sigmoid((1 - decay) * h) + s
        v = h - s * (threshold + sigmoid(m))

    The sigmoids are not rounded exactly: kernels match the reference approximately, see
    docs/conventions.md, Dtypes.

    Shapes: `x`, spikes: `[T, B, ...]` (float32, bfloat16 or float16); `v`, `m`: `[B, ...]`
    (float32).

    Source: Huang et al., "CLIF: Complementary Leaky Integrate-and-Fire Neuron for Spiking Neural
    Networks", ICML 2024 (decay = 1 - 1/tau).

    Example::

        neuron = sf.CLIF(decay=0.5)
        spikes, m = neuron(torch.rand(8, 32, 128), outputs=("spikes", "m"))  # m rises at spikes

    Args:
        decay: factor of the previous potential, in [0, 1].
        threshold, detach_reset, surrogate: see `Firing`.

    Raises:
        TypeError, ValueError: a parameter has the wrong type or is out of range.
    """

    m = State()

    def __init__(
        self,
        decay: Value = 0.5,
        threshold: Value = 1.0,
        *,
        detach_reset: bool = False,
        surrogate: Surrogate | None = None,
    ) -> None:
        super().__init__(
            decay, threshold, reset="soft", detach_reset=detach_reset, surrogate=surrogate
        )

    def step(  # type: ignore[override]
        self, x: Tensor, v: Tensor, m: Tensor
    ) -> tuple[Tensor, States]:
        h = self.charge(x, v)
        self.expose(h=h)
        s = self.surrogate(h - self.threshold)
        m = m * torch.sigmoid((1 - self.decay) * h) + s
        return s, (self.after(h, s, self.threshold + torch.sigmoid(m)), m)
