"""The memory layout of a channel dimension."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple


class ChannelLayout(NamedTuple):
    """Dense memory viewed as `[outer, channels, inner]`."""

    outer: int
    channels: int
    inner: int


@lru_cache(maxsize=512)
def channel_layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> ChannelLayout | None:
    """Return the layout of `[T, B, C, ...]`; None for memory that is not dense."""
    dims = [d for d in range(len(shape)) if shape[d] != 1 and d != 2]
    dense = 1
    for d in sorted((*dims, 2), key=lambda d: (strides[d], -d)):
        if shape[d] != 1 and strides[d] != dense:
            return None
        dense *= shape[d]
    if shape[2] == 1:
        return ChannelLayout(1, 1, dense)
    inner = math.prod(shape[d] for d in dims if strides[d] < strides[2])
    return ChannelLayout(dense // (inner * shape[2]), shape[2], inner)
