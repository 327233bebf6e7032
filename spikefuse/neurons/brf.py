"""Balanced resonate-and-fire."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spikefuse.neurons.definition import Neuron, State, States
from spikefuse.neurons.parameters import Value, number, positive
from spikefuse.neurons.surrogate import Surrogate, checked


class BRF(Neuron):
    """Balanced resonate-and-fire neuron: a damped oscillator that does not diverge.

    Equation, per time step, with oscillator `u + i v`, refractoriness `q`, input `x`, spike `s`::

        b = (sqrt(1 - (dt * omega)^2) - 1) / dt - damping - q
        u, v = u + dt * (b * u - omega * v + x), v + dt * (b * v + omega * u)
        s = 1 if u >= threshold + q else 0
        q = 0.9 * q + s

    Without damping and `q`, `b` is the divergence boundary, at which the amplitude is constant.
    There is no reset. Because of the square root, kernels match the reference approximately.

    Shapes: those of `LIF`; `u`, `v`, `q`: `[B, ...]` (float32).

    Source: Higuchi et al., "Balanced Resonate-and-Fire Neurons", ICML 2024. For spoken digits, the
    authors draw and learn `omega` and `damping`, their b offset, as in the example.

    Example::

        omega = sf.LearnablePositive(torch.empty(128).uniform_(5.0, 10.0))
        neuron = sf.BRF(omega, sf.LearnablePositive(torch.empty(128).uniform_(2.0, 3.0)))
        spikes = neuron(50 * torch.rand(100, 32, 128))

    Args:
        omega: angular frequency, in radians per unit of `dt`, from 0 to `1 / dt`.
        damping: distance from the divergence boundary, at least 0.
        threshold: firing threshold of `u` at rest.
        dt: length of a time step, positive.
        surrogate: replaces the derivative of the spike; `Sigmoid(4.0)` by default.

    Raises:
        TypeError, ValueError: a parameter has the wrong type or is out of range.
    """

    u, v, q = State(), State(), State()

    def __init__(
        self,
        omega: Value = 10.0,
        damping: Value = 1.0,
        threshold: Value = 1.0,
        *,
        dt: float = 0.01,
        surrogate: Surrogate | None = None,
    ) -> None:
        super().__init__()
        self.dt = self._option("dt", dt, positive)
        self.threshold = self._option("threshold", threshold, number)
        self.omega = self._option("omega", omega, number, 0)
        self.damping = self._option("damping", damping, number, 0)
        self.surrogate = self._option("surrogate", surrogate, checked)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "omega":
            number(name, value, 0, 1 / self.dt)
        elif name == "dt":
            number("omega", getattr(self, "omega", 0.0), 0, 1 / positive(name, value))
        super().__setattr__(name, value)

    def step(self, x: Tensor, u: Tensor, v: Tensor, q: Tensor) -> tuple[Tensor, States]:
        angle = self.dt * self.omega
        b = (torch.sqrt(1 - angle * angle) - 1) * (1 / self.dt) - self.damping - q
        h = u + self.dt * (b * u - self.omega * v + x)
        self.expose(h=h)
        s = self.surrogate(h - self.threshold - q)
        return s, (h, v + self.dt * (b * v + self.omega * u), 0.9 * q + s)
