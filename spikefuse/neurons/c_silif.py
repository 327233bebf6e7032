"""Complex SiLIF."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spikefuse.neurons.definition import State, States
from spikefuse.neurons.firing import Firing
from spikefuse.neurons.parameters import Value, number, positive
from spikefuse.neurons.surrogate import Surrogate


class CSiLIF(Firing):
    """Complex SiLIF neuron (C-SiLIF): an oscillator with the exact decay of state space models.

    Equation, per time step, with potential `real + i imag`, input `x`, spike `s`::

        real + i imag = exp((-rate + i frequency) * dt) * (real + i imag) + gain * x
        h = 2 * real
        s = 1 if h >= threshold else 0
        real = real - threshold * s / 2

    Because of the exponential, kernels match the reference approximately.

    Shapes: those of `LIF`; `real`, `imag`: `[B, ...]` (float32).

    Source: Fabre et al., "SiLIF: Structured State Space Model Dynamics and Parametrization for
    Spiking Neural Networks", arXiv:2506.06374. The authors learn all but the threshold.

    Example::

        dt = sf.LearnablePositive(torch.empty(128).uniform_(-4.6, -0.7).exp())
        neuron = sf.CSiLIF(dt, gain=nn.Parameter(torch.rand(128)))
        spikes = neuron(torch.rand(100, 32, 128))

    Args:
        dt: length of a time step, positive.
        rate: rate of the decay, per unit of `dt`, at least 0.
        frequency: angular frequency, in radians per unit of `dt`.
        gain: factor of the input.
        threshold, detach_reset, surrogate: see `Firing`.

    Raises:
        TypeError, ValueError: a parameter has the wrong type or is out of range.
    """

    real, imag = State(), State()

    def __init__(
        self,
        dt: Value = 0.1,
        rate: Value = 0.5,
        frequency: Value = math.pi,
        gain: Value = 0.5,
        threshold: Value = 1.0,
        *,
        detach_reset: bool = False,
        surrogate: Surrogate | None = None,
    ) -> None:
        super().__init__(threshold, reset="soft", detach_reset=detach_reset, surrogate=surrogate)
        self.dt = self._option("dt", dt, positive)
        self.rate = self._option("rate", rate, number, 0.0)
        self.frequency = self._option("frequency", frequency, number)
        self.gain = self._option("gain", gain, number)

    def step(self, x: Tensor, real: Tensor, imag: Tensor) -> tuple[Tensor, States]:
        decay, angle = torch.exp(-self.rate * self.dt), self.frequency * self.dt
        a, b = decay * torch.cos(angle), decay * torch.sin(angle)
        s, v = self.fire(2 * (a * real - b * imag + self.gain * x), self.threshold)
        return s, (0.5 * v, b * real + a * imag)
