"""Where channels lie in memory."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor


class Place(NamedTuple):
    """Dense memory as an array `[outer, channels, inner]`."""

    outer: int
    channels: int
    inner: int


def placed(x: Tensor, dim: int) -> tuple[Tensor, Place]:
    """`x`, or a copy if it is not dense, and where the channels of `dim` lie in it."""
    place = _place(tuple(x.shape), x.stride(), dim)
    if place is None:
        x = x.contiguous()
        place = _place(tuple(x.shape), x.stride(), dim)
        assert place is not None
    return x, place


@lru_cache(maxsize=4096)
def _place(shape: tuple[int, ...], strides: tuple[int, ...], dim: int) -> Place | None:
    dims = [d for d in range(len(shape)) if shape[d] != 1 and d != dim]
    dense = 1
    for d in sorted((*dims, dim), key=lambda d: (strides[d], -d)):
        if shape[d] != 1 and strides[d] != dense:
            return None
        dense *= shape[d]
    if shape[dim] == 1:
        return Place(1, 1, dense)
    inner = math.prod(shape[d] for d in dims if strides[d] < strides[dim])
    return Place(dense // (inner * shape[dim]), shape[dim], inner)
