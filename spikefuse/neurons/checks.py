"""Checks of arguments that several packages share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from spikefuse._torch import is_traced, num_dispatch_modes

#: Types of tensors whose operations no subclass overrides.
PLAIN = (Tensor, torch.nn.Parameter)


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


def is_dense(value: Any) -> bool:
    """Whether a value is a tensor that is neither sparse nor nested."""
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested


def check_tensor(name: str, value: Any, shape: str = "") -> None:
    """Raise a TypeError unless an argument is a dense tensor.

    Args:
        shape: that is expected, for the error, such as " [T, B, ...]".
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}: expected a tensor{shape}")
    if value.is_nested:
        raise TypeError(
            f"{name} is a nested tensor: expected a dense tensor{shape}; pad its sequences, as by "
            "torch.nn.utils.rnn.pad_sequence, and pass their lengths= to what reads the outputs, "
            "see docs/how-to/lengths.md"
        )
    if not is_dense(value):
        raise TypeError(f"{name} is {value.layout}: expected a dense tensor{shape}, x.to_dense()")


def is_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether nothing observes or transforms operations on these tensors, so that the dispatcher
    can be skipped."""
    if is_traced() or num_dispatch_modes():
        return False
    try:
        for t in tensors:
            if type(t) not in PLAIN or not (t.data_ptr() or t.numel() == 0):
                return False
    except RuntimeError:  # function transforms hide the memory
        return False
    # Outside of forward-mode differentiation, the first tensor is unpacked into itself.
    if not tensors or unpack_dual(tensors[0]).primal is tensors[0]:
        return True
    return all(unpack_dual(t).tangent is None for t in tensors)
