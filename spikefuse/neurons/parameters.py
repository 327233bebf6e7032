"""The values of neurons and surrogates: checked numbers, and the modules that hold them."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn


class Learnable(nn.Module):
    """A parameter computed by PyTorch from learnable tensors, once per call: `value = self()`.

    Assigned where a float could stand (`LIF(decay=LearnableFraction(0.9))`). The kernel receives
    the value and returns its gradient; autograd does the rest. `forward` returns a 0-d tensor,
    or a 1-d tensor of one value per channel.
    """

    def forward(self) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not define forward(self)")


class Holder(nn.Module):
    """A module in whose attributes tensors are buffers, so that `.to()` moves them and
    `state_dict()` has them; other values may take their place, and they that of others."""

    def __setattr__(self, name: str, value: Any) -> None:
        buffers = self.__dict__.get("_buffers")
        if buffers is None:
            raise AttributeError(
                f"{type(self).__name__}.{name} is set too early: call super().__init__() first"
            )
        is_plain = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        if is_plain and name not in buffers:
            self.__dict__.pop(name, None)
            self.register_buffer(name, value)
            return
        if name in buffers and not isinstance(value, Tensor | None):
            delattr(self, name)
        super().__setattr__(name, value)


def number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> Any:
    """A checked parameter: a finite float in [low, high]; tensors and `Learnable` as they are.

    Raises:
        TypeError: not a number, a floating-point tensor or a `Learnable`.
        ValueError: not finite, or out of range.
    """
    if isinstance(value, Learnable):
        return value
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            raise TypeError(f"{name} is a {value.dtype} tensor: expected a floating-point one")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}: expected a number, a tensor or a Learnable")
    if not (math.isfinite(value) and low <= value <= high):
        bounds = "a finite number" if math.isinf(low) else f"a number in [{low:g}, {high:g}]"
        raise ValueError(f"{name} is {value!r}: expected {bounds}")
    return float(value)


def positive(name: str, value: Any) -> Any:
    """`number`, for a float that must be greater than 0."""
    if isinstance(value, int | float) and not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}: expected a positive finite number")
    return number(name, value)
