"""The memory layout of a channel dimension."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor


class ChannelLayout(NamedTuple):
    """Dense memory viewed as `[outer, channels, inner]`."""

    outer: int
    channels: int
    inner: int


def channel_layout(x: Tensor, dim: int) -> tuple[Tensor, ChannelLayout]:
    """Return `x`, copied if it is not dense, and its layout with channels in dimension `dim`."""
    layout = _layout(tuple(x.shape), x.stride(), dim)
    if layout is None:
        x = x.contiguous()
        layout = _layout(tuple(x.shape), x.stride(), dim)
        assert layout is not None
    return x, layout


@lru_cache(maxsize=512)
def _layout(shape: tuple[int, ...], strides: tuple[int, ...], dim: int) -> ChannelLayout | None:
    dims = [d for d in range(len(shape)) if shape[d] != 1 and d != dim]
    dense = 1
    for d in sorted((*dims, dim), key=lambda d: (strides[d], -d)):
        if shape[d] != 1 and strides[d] != dense:
            return None
        dense *= shape[d]
    if shape[dim] == 1:
        return ChannelLayout(1, 1, dense)
    inner = math.prod(shape[d] for d in dims if strides[d] < strides[dim])
    return ChannelLayout(dense // (inner * shape[dim]), shape[dim], inner)
