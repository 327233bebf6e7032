"""Checks of arguments that several packages share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def is_integer(value: Any, low: int) -> bool:
    """Whether a value is an integer of at least `low`, of Python or NumPy."""
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_whole and value >= low


def integer(name: str, value: Any, low: int = 1) -> int:
    """Check an integer of at least `low`.

    Raises:
        ValueError: it is not.
    """
    if not is_integer(value, low):
        raise ValueError(f"{name} is {value!r}: expected an integer of at least {low}")
    return int(value)


def check_tensor(name: str, value: Any, shape: str = "") -> None:
    """Raise a TypeError unless an argument is a dense tensor.

    Args:
        shape: that is expected, for the error, such as " [T, B, ...]".
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}: expected a tensor{shape}")
    if value.layout is not torch.strided:
        raise TypeError(f"{name} is {value.layout}: expected a dense tensor{shape}, x.to_dense()")
