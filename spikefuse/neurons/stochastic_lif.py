"""Leaky integrate-and-fire with escape noise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spikefuse.neurons.definition import States
from spikefuse.neurons.firing import Reset
from spikefuse.neurons.lif import LIF
from spikefuse.neurons.parameters import Value, positive


class StochasticLIF(LIF):
    """LIF neuron that fires at random, the more likely the higher its potential (escape noise).

    Equation, per time step, with potential `v`, input `x`, spike `s` and the `h` of `LIF`::

        p = sigmoid((h - threshold) / temperature)
        s = 1 with probability p, else 0; then the reset of `LIF`

    The derivative of the spike is that of `p`. Each call draws logistic `noise` `[T, B, ...]` by
    PyTorch's generator, and `s = 1 if h + temperature * noise >= threshold`. The noise is a second
    input of the kernel, with its memory; a call may also pass it, `neuron(x, noise)`.

    Shapes: those of `LIF`; `noise`: that of `x`.

    Source: Gerstner et al., "Neuronal Dynamics", Cambridge University Press, 2014, chapter 9; the
    derivative: Ma et al., "Exploiting Noise as a Resource for Computation and Learning in Spiking
    Neural Networks", Patterns 4, 2023.

    Example::

        spikes = sf.StochasticLIF(temperature=0.2)(torch.rand(8, 32, 128))

    Args:
        decay, threshold, decay_input, v_reset, reset, detach_reset: see `LIF`.
        temperature: width of `p`, in the unit of the input, positive.

    Raises:
        TypeError, ValueError: a parameter has the wrong type or is out of range.
    """

    def __init__(
        self,
        decay: Value = 0.5,
        threshold: Value = 1.0,
        temperature: Value = 0.25,
        *,
        decay_input: bool = False,
        v_reset: Value = 0.0,
        reset: Reset = "hard",
        detach_reset: bool = False,
    ) -> None:
        firing: Any = {"v_reset": v_reset, "reset": reset, "detach_reset": detach_reset}
        super().__init__(decay, threshold, decay_input=decay_input, **firing)
        self.temperature = self._option("temperature", temperature, positive)
        del self.surrogate

    def forward(self, x: Tensor, noise: Tensor | None = None, **options: Any) -> Any:
        if noise is None:
            noise = torch.rand_like(x, dtype=torch.float32).logit(eps=1e-7).to(x.dtype)
        return super().forward(x, noise, **options)

    def step(  # type: ignore[override]
        self, x: Tensor, noise: Tensor, v: Tensor
    ) -> tuple[Tensor, States]:
        h = self.charge(x, v)
        self.expose(h=h)
        p = torch.sigmoid((h - self.threshold) / self.temperature)
        fired = h + self.temperature * noise >= self.threshold
        # The difference is 0, so that adding it rounds nothing, and has the derivative of p.
        s = fired.to(h.dtype) + (p - p.detach())
        return s, (self.after(h, s, self.threshold),)
