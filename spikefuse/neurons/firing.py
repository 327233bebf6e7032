"""The firing and reset shared by all threshold neurons."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from spikefuse.neurons.definition import Neuron
from spikefuse.neurons.parameters import Value, flag, number, one_of
from spikefuse.neurons.surrogate import Surrogate, checked

Reset = Literal["hard", "soft"]
RESETS = get_args(Reset)


class Firing(Neuron):
    """Base of neurons that spike when their potential reaches a threshold, and are then reset.

    Args:
        threshold: firing threshold, in the unit of the input.
        v_reset: potential after a spike (hard reset only).
        reset: "hard" (to `v_reset`) or "soft" (subtract the threshold).
        detach_reset: stop gradients through the reset.
        surrogate: replaces the derivative of the spike; `Sigmoid(4.0)` by default.

    Raises:
        TypeError, ValueError: a parameter has the wrong type, is out of range or is unknown.
    """

    _option_hint = (
        "decay_from_tau(tau) converts a time constant to a decay; outputs= and state= are "
        "arguments of the call; docs/differences.md lists the equivalents of other libraries' "
        "options"
    )

    def __init__(
        self,
        threshold: Value = 1.0,
        v_reset: Value = 0.0,
        reset: Reset = "hard",
        detach_reset: bool = False,
        surrogate: Surrogate | None = None,
    ) -> None:
        super().__init__()
        if v_reset is None:
            raise TypeError("v_reset is None: expected a number; for a soft reset use reset='soft'")
        self.threshold = self._option("threshold", threshold, number)
        self.v_reset = self._option("v_reset", v_reset, number)
        self.reset = self._option("reset", reset, one_of, *RESETS)
        self.detach_reset = self._option("detach_reset", detach_reset, flag)
        self.surrogate = self._option("surrogate", surrogate, checked)

    def fire(self, h: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
        """Return the spike and the potential after the reset, given the potential `h` before it::

        s = 1 if h >= threshold else 0
        v = h * (1 - s) + v_reset * s   (hard)   or   h - threshold * s   (soft)
        """
        self.expose(h=h)
        s = self.surrogate(h - threshold)
        return s, self.after(h, s, threshold)

    def after(self, h: Tensor, s: Tensor, threshold: Tensor) -> Tensor:
        """Return the potential after the reset caused by the spike `s`."""
        r = s.detach() if self.detach_reset else s
        return h * (1 - r) + self.v_reset * r if self.reset == "hard" else h - threshold * r
