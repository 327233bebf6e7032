"""`spikefuse.kernels.bits` on a GPU, or in Triton's interpreter.

Threads access 16 bytes at a time if the number of values is a multiple of 16.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from spikefuse.kernels.triton_runtime import TritonLaunch

# Bytes of bits per block. With 32 values per thread, several loads are in flight at once.
BLOCK, WARPS = 512, 4


@triton.jit
def pack_kernel(x, bits, num, BLOCK: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 8)
    value = byte[:, None] * 8 + bit[None, :]
    fired = tl.load(x + value, mask=value < num, other=0.0).to(tl.float32) != 0.0
    packed = tl.sum(fired.to(tl.int32) << bit[None, :], axis=1)
    tl.store(bits + byte, packed.to(tl.uint8), mask=byte * 8 < num)


@triton.jit
def unpack_kernel(bits, x, num, BLOCK: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 8)
    value = byte[:, None] * 8 + bit[None, :]
    packed = tl.load(bits + byte, mask=byte * 8 < num, other=0).to(tl.int32)
    fired = ((packed[:, None] >> bit[None, :]) & 1).to(tl.float32)
    tl.store(x + value, fired.to(x.dtype.element_ty), mask=value < num)


def pack(x: Tensor, bits: Tensor) -> None:
    """Write one bit per value of `x`, which is dense."""
    if x.numel():
        _launch("pack", x.numel(), x.dtype, x.device)((x, bits))


def unpack(bits: Tensor, x: Tensor) -> None:
    """Write 0 or 1 to each value of `x`, which is dense."""
    if x.numel():
        _launch("unpack", x.numel(), x.dtype, x.device)((bits, x))


def compile_unpack(x: Tensor) -> None:
    """Begin to compile the kernel that unpacks the bits of `x`."""
    _launch("unpack", x.numel(), x.dtype, x.device).compile_ahead((torch.uint8, x.dtype))


# Keyed by name, because a kernel is slow to hash.
_KERNELS = {"pack": pack_kernel, "unpack": unpack_kernel}


@lru_cache(maxsize=512)
def _launch(name: str, num: int, dtype: torch.dtype, device: torch.device) -> TritonLaunch:
    grid = (-(-num // (8 * BLOCK)), 1, 1)
    return TritonLaunch(_KERNELS[name], grid, (num, BLOCK), WARPS, device)
