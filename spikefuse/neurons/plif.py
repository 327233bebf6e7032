"""Parametric leaky integrate-and-fire."""

from __future__ import annotations

from spikefuse.neurons.firing import Reset
from spikefuse.neurons.learnable import LearnableFraction
from spikefuse.neurons.lif import LIF
from spikefuse.neurons.parameters import Value
from spikefuse.neurons.surrogate import Surrogate


class PLIF(LIF):
    """Parametric LIF neuron: `LIF` with a learned decay, shared or one per channel.

    Equation: that of `LIF` with `decay = sigmoid(logit)`.

    Shapes: those of `LIF`.

    Source: Fang et al., "Incorporating Learnable Membrane Time Constant to Enhance Learning of
    Spiking Neural Networks", ICCV 2021 (decay = 1 - 1/tau; the paper scales the input:
    `decay_input=True`).

    Args:
        decay: value before training, strictly between 0 and 1.
        channels: number of channels (dim 2 of `[T, B, C, ...]`), each with its own decay; None for
            a single decay.
        decay_input, threshold, v_reset, reset, detach_reset, surrogate: see `LIF`.

    Raises:
        TypeError, ValueError: a parameter has the wrong type or is out of range.
    """

    def __init__(
        self,
        decay: float = 0.5,
        threshold: Value = 1.0,
        channels: int | None = None,
        *,
        decay_input: bool = False,
        v_reset: Value = 0.0,
        reset: Reset = "hard",
        detach_reset: bool = False,
        surrogate: Surrogate | None = None,
    ) -> None:
        super().__init__(
            LearnableFraction(decay, channels),
            threshold,
            decay_input=decay_input,
            v_reset=v_reset,
            reset=reset,
            detach_reset=detach_reset,
            surrogate=surrogate,
        )
