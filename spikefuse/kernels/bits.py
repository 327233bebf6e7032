"""Binary tensors as one bit per value."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spikefuse.kernels.threads import import_module

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Packed(NamedTuple):
    """A binary tensor as one bit per value.

    Attributes:
        bits: uint8; value i in memory is bit i % 8 of byte i // 8.
        num: number of values in memory.
        shape, strides, offset: the tensor that `unpack` returns, in memory of `num` values.
    """

    bits: Tensor
    num: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    def unpack(self) -> Tensor:
        """Return the tensor in new memory, with 1 for every nonzero value."""
        memory = torch.empty(self.num, dtype=self.dtype, device=self.bits.device)
        _kernels(memory).unpack(self.bits, memory)
        return memory.as_strided(self.shape, self.strides, self.offset)


def pack(x: Tensor) -> Packed:
    """Store one bit per value of `x`: whether it is nonzero. This is lossless for binary tensors.

    Packs the memory of `x` in order, whatever its layout, and never synchronizes with a GPU.

    Raises:
        TypeError: `x` is not float32, bfloat16 or float16.
        ValueError: the memory of `x` has gaps or overlaps, or its device is not supported.
    """
    if x.dtype not in DTYPES:
        raise TypeError(f"x is {x.dtype}: expected float32, bfloat16 or float16")
    shape, strides, num = tuple(x.shape), x.stride(), x.numel()
    if not _is_dense(shape, strides):
        raise ValueError(
            f"x has shape {list(shape)} and strides {list(strides)}: expected memory without gaps "
            "or overlaps; pass x.contiguous()"
        )
    bits = torch.empty(-(-num // 8), dtype=torch.uint8, device=x.device)
    _kernels(x).pack(x, bits)
    return Packed(bits, num, x.dtype, shape, strides)


def _kernels(x: Tensor) -> Any:
    if x.is_cuda:
        return import_module("spikefuse.kernels.bits_triton")
    if x.is_cpu:
        return import_module("spikefuse.kernels.bits_numba")
    raise ValueError(f"no kernels for device '{x.device.type}': move x to cuda or cpu")


@lru_cache(maxsize=512)
def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for stride, size in sorted((b, a) for a, b in zip(shape, strides, strict=True) if a != 1):
        if stride != expected and 0 not in shape:
            return False
        expected *= size
    return True
