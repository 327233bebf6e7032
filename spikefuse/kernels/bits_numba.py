"""`spikefuse.kernels.bits` on a CPU."""

# mypy: disable-error-code="call-arg"
from __future__ import annotations

import numpy as np
from torch import Tensor

from spikefuse.kernels.numba_host import LINE, arrays, flat, shared
from spikefuse.kernels.numba_runtime import f32, kernel, load, store


@kernel
def pack_kernel(first, last, x, bits):
    whole = min(last, x.size // 8)
    for byte in range(first, whole):
        packed = np.uint8(0)
        for bit in range(8):
            packed |= np.uint8(load(x, 8 * byte + bit, 0) != f32(0)) << np.uint8(bit)
        bits[byte] = packed
    for byte in range(whole, last):
        packed = np.uint8(0)
        for i in range(8 * byte, x.size):
            packed |= np.uint8(load(x, i, 0) != f32(0)) << np.uint8(i % 8)
        bits[byte] = packed


@kernel
def unpack_kernel(first, last, bits, x):
    whole = min(last, x.size // 8)
    for byte in range(first, whole):
        packed = bits[byte]
        for bit in range(8):
            store(x, 8 * byte + bit, f32((packed >> np.uint8(bit)) & np.uint8(1)), 0)
    for byte in range(whole, last):
        for i in range(8 * byte, x.size):
            store(x, i, f32((bits[byte] >> np.uint8(i % 8)) & np.uint8(1)), 0)


def pack(x: Tensor, bits: Tensor) -> None:
    """Write one bit per value of `x`, which is dense."""
    if x.numel():
        shared(pack_kernel, bits.numel(), LINE, x.numel(), flat(x), bits.numpy())


def unpack(bits: Tensor, x: Tensor) -> None:
    """Write 0 or 1 to each value of `x`, which is dense."""
    if x.numel():
        values = arrays((x,), are_large=True)
        shared(unpack_kernel, bits.numel(), LINE, x.numel(), bits.numpy(), *values)
