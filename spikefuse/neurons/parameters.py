"""Checked parameters, and the module class that holds them and reports their changes."""

from __future__ import annotations

import math
from abc import ABCMeta
from typing import Any

from torch import Tensor, nn

from spikefuse.neurons.learnable import Learnable

#: What a parameter may be.
Value = float | Tensor | Learnable

#: Replaced whenever an attribute of a `Holder`, or of a class of holders, is assigned or deleted.
epoch = object()


def _invalidate() -> None:
    global epoch
    epoch = object()


class _HolderType(ABCMeta):
    """Reports changes of class constants. Derives from `ABCMeta` to allow abstract holders."""

    # Virtual subclasses are not supported: the ordinary check is faster.
    __instancecheck__ = type.__instancecheck__

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        _invalidate()

    def __delattr__(cls, name: str) -> None:
        super().__delattr__(name)
        _invalidate()


class Holder(nn.Module, metaclass=_HolderType):
    """Base of definitions and surrogates.

    Tensors assigned to attributes become buffers: `.to()` moves them and `state_dict()` includes
    them. A value of any kind may replace a value of another kind.
    """

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
        _invalidate()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        _invalidate()

    def register_buffer(self, *args: Any, **kwargs: Any) -> None:
        super().register_buffer(*args, **kwargs)
        _invalidate()

    def register_parameter(self, *args: Any, **kwargs: Any) -> None:
        super().register_parameter(*args, **kwargs)
        _invalidate()

    def add_module(self, *args: Any, **kwargs: Any) -> None:
        super().add_module(*args, **kwargs)
        _invalidate()


def number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> Any:
    """Check a parameter: a finite float in [low, high], a tensor or a `Learnable`.

    Raises:
        TypeError: not a number, a floating-point tensor or a `Learnable`.
        ValueError: not finite, or out of range.
    """
    if isinstance(value, Learnable):
        return value
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            raise TypeError(f"{name} is a {value.dtype} tensor: expected a floating-point tensor")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}: expected a number, a tensor or a Learnable")
    if not (math.isfinite(value) and low <= value <= high):
        bounds = "a finite number" if math.isinf(low) else f"a number in [{low:g}, {high:g}]"
        raise ValueError(f"{name} is {value!r}: expected {bounds}")
    return float(value)


def positive(name: str, value: Any) -> Any:
    """Check a parameter as `number` does; a float must be greater than 0."""
    if isinstance(value, int | float) and not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}: expected a positive finite number")
    return number(name, value)
