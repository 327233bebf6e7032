"""Fire and reset, which all threshold neurons share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from spikefuse.neurons.definition import Definition, number
from spikefuse.neurons.learnable import Learnable
from spikefuse.surrogate import Sigmoid, Surrogate

RESETS = ("hard", "soft")
Value = float | Tensor | Learnable


def positive(name: str, value: Any) -> Any:
    """`number`, for a float that must be greater than 0."""
    value = number(name, value)
    if isinstance(value, float) and value <= 0:
        raise ValueError(f"{name} is {value!r}: expected a positive number")
    return value


class Firing(Definition):
    """A neuron that spikes when its potential reaches a threshold, and is reset then.

    Args:
        threshold: firing threshold, in the unit of the input.
        v_reset: potential after a spike (hard reset only).
        reset: "hard" (to `v_reset`) or "soft" (subtract the threshold).
        detach_reset: keep gradients from flowing through the reset.
        surrogate: replaces the derivative of the spike; `Sigmoid(4.0)` by default.

    Raises:
        TypeError, ValueError: a parameter of the wrong kind or out of range.
    """

    def __init__(
        self,
        threshold: Value = 1.0,
        v_reset: Value = 0.0,
        reset: str = "hard",
        detach_reset: bool = False,
        surrogate: Surrogate | None = None,
    ) -> None:
        super().__init__()
        if reset not in RESETS:
            raise ValueError(f"reset is {reset!r}: expected one of {', '.join(RESETS)}")
        if not isinstance(surrogate, Surrogate | None):
            raise TypeError(f"surrogate is {surrogate!r}: expected one such as Sigmoid(4.0)")
        self.threshold = number("threshold", threshold)
        self.v_reset = number("v_reset", v_reset)
        self.reset, self.detach_reset = reset, bool(detach_reset)
        self.surrogate = Sigmoid() if surrogate is None else surrogate

    def fire(self, h: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
        """Spike and potential after reset, from the potential `h` before it::

        s = 1 if h >= threshold else 0
        v = h * (1 - s) + v_reset * s   (hard)   or   h - threshold * s   (soft)
        """
        s = self.surrogate(h - threshold)
        return s, self.after(h, s, threshold)

    def after(self, h: Tensor, s: Tensor, threshold: Tensor) -> Tensor:
        """The potential after the reset that the spike `s` causes."""
        r = s.detach() if self.detach_reset else s
        return h * (1 - r) + self.v_reset * r if self.reset == "hard" else h - threshold * r
