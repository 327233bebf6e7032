"""Integrate-and-fire neuron of converted networks."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from spikefuse.neurons.definition import Neuron, State, States
from spikefuse.neurons.parameters import Value, number, one_of, positive
from spikefuse.neurons.surrogate import Surrogate, checked

Negative = Literal["never", "undo", "always"]


class RateIF(Neuron):
    """Integrate-and-fire neuron whose mean output approximates a clipped ReLU of its mean input.

    Equation, per time step, with potential `v` in units of the threshold, which is 0.5 before the
    first step, input `x`, spike `s` and the excess `n` of positive over negative spikes::

        h = v + (x + shift) / threshold
        p = 1 if h >= 1 else 0
        q = 1 if h >= 0 else 0
        s = p - (1 - q) if negative spikes are allowed, else p
        v = h - s,  n = n + s
        y = threshold * s

    The surrogate replaces the derivatives of `p` and `q`; no gradient flows through `n`.

    For an input with the mean `m` over T steps, the mean of `y` is `threshold` times
    clip(floor(T * m / threshold + 0.5) / T, 0, 1) if the input is constant. If it varies, negative
    spikes undo those that came too early. Where they are "always" allowed, it is clipped to
    [-1, 1].

    Shapes: `x`, `y`: `[T, B, ...]` (float32, bfloat16 or float16); states: `[B, ...]` (float32).

    Source: Bu et al., "Optimal ANN-SNN Conversion for High-accuracy and Ultra-low-latency Spiking
    Neural Networks", ICLR 2022 (initial potential); Wang et al., "Signed Neuron with Memory:
    Towards Simple, Accurate and High-Efficient ANN-SNN Conversion", IJCAI 2022 (negative spikes).

    Example::

        neuron = sf.RateIF(threshold=2.0)
        x = torch.full((8, 1), 0.5)
        y = neuron(x).mean(0)  # 0.5: two of eight steps have a spike of 2.0

    Args:
        threshold: the largest mean of the output, positive; a tensor has one for each channel.
        negative: "never" emit negative spikes, "undo" positive ones while n > 0, or emit them
            "always", for activations that may be negative.
        shift: is added to the input.
        surrogate: replaces the derivative of the spike; `Sigmoid(4.0)` by default.

    Raises:
        TypeError, ValueError: a parameter has the wrong type or is out of range.
    """

    v = State(0.5)
    n = State()

    def __init__(
        self,
        threshold: Value = 1.0,
        negative: Negative = "undo",
        *,
        shift: Value = 0.0,
        surrogate: Surrogate | None = None,
    ) -> None:
        super().__init__()
        self.threshold = self._option("threshold", threshold, positive)
        self.negative = self._option("negative", negative, one_of, *get_args(Negative))
        self.shift = self._option("shift", shift, number)
        self.surrogate = self._option("surrogate", surrogate, checked)

    def step(self, x: Tensor, v: Tensor, n: Tensor) -> tuple[Tensor, States]:
        h = v + (x + self.shift) / self.threshold
        self.expose(h=h)
        s = self.surrogate(h - 1)
        below = 1 - self.surrogate(h)
        if self.negative == "undo":
            s = s - below * (n >= 0.5).to(h.dtype)
        elif self.negative == "always":
            s = s - below
        return self.threshold * s, (h - s, n + s.detach())
