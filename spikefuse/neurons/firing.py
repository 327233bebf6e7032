"""Fire and reset, which all threshold neurons share."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from spikefuse.neurons.definition import Definition, number
from spikefuse.neurons.learnable import Learnable
from spikefuse.neurons.parameters import positive as positive
from spikefuse.neurons.surrogate import Sigmoid, Surrogate

RESETS = ("hard", "soft")
Value = float | Tensor | Learnable


class Firing(Definition):
    """A neuron that spikes when its potential reaches a threshold, and is reset then.

    Args:
        threshold: firing threshold, in the unit of the input.
        v_reset: potential after a spike (hard reset only).
        reset: "hard" (to `v_reset`) or "soft" (subtract the threshold).
        detach_reset: keep gradients from flowing through the reset.
        surrogate: replaces the derivative of the spike; `Sigmoid(4.0)` by default.

    Raises:
        TypeError, ValueError: a parameter of the wrong kind or out of range, or not known.
    """

    def __init__(
        self,
        threshold: Value = 1.0,
        v_reset: Value = 0.0,
        reset: str = "hard",
        detach_reset: bool = False,
        surrogate: Surrogate | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown:
            raise _no_option(type(self), next(iter(unknown)))
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


def _no_option(cls: type[Firing], name: str) -> TypeError:
    names: dict[str, None] = {}
    for base in cls.__mro__[: cls.__mro__.index(Firing) + 1]:
        init = vars(base).get("__init__")
        if init is not None:
            parameters = list(inspect.signature(init).parameters.values())[1:]
            names |= dict.fromkeys(p.name for p in parameters if p.kind != p.VAR_KEYWORD)
    return TypeError(
        f"{cls.__name__} has no option '{name}', but {', '.join(names)}; decay_from_tau(tau) is "
        "the decay of a time constant, and docs/differences.md tells what other libraries' "
        "options are here"
    )
