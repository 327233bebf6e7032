"""What generated Numba kernels import: typed memory access, mathematics, threads.

Generated loops run over neighbouring neurons and must vectorise. LLVM has to know for that
that arrays don't overlap: each access carries the number of its array (`slot`) as alias
metadata. Half precision is converted at the access: bfloat16 lies in uint16 arrays, float16 in
int16 arrays.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from spikefuse.compiler.emit_numba import MAX_SLOTS

__all__ = [
    "channel_rows",
    "exp",
    "f32",
    "floor",
    "kernel",
    "load",
    "log",
    "sigmoid",
    "sqrt",
    "store",
]

f32 = np.float32
# NumPy's keep float32; those of math would compute in double precision.
floor, log, sqrt = np.floor, np.log, np.sqrt

# No fastmath: contraction or reassociation would change spikes.
kernel = numba.njit(nogil=True, cache=True, error_model="numpy")
_inline = numba.njit(inline="always", error_model="numpy")


def _annotate(builder: Any, instruction: Any, slot: int) -> None:
    module = builder.module

    def metadata(*operands: Any) -> Any:
        return module.add_metadata(list(operands))

    domain = metadata(ir.MetaDataString(module, "spikefuse"))
    scopes = [metadata(ir.MetaDataString(module, f"slot{i}"), domain) for i in range(MAX_SLOTS)]
    others = [scope for i, scope in enumerate(scopes) if i != slot]
    instruction.set_metadata("alias.scope", metadata(scopes[slot]))
    instruction.set_metadata("noalias", metadata(*others))


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index], inbounds=True)


@intrinsic(prefer_literal=True)
def load(typing_context: Any, array: Any, index: Any, slot: Any) -> Any:
    """`array[index]` as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(_address(context, builder, array, args[0], args[1]))
        _annotate(builder, value, slot.literal_value)
        if array.dtype == types.uint16:
            wide = builder.zext(value, ir.IntType(32))
            return builder.bitcast(builder.shl(wide, ir.Constant(ir.IntType(32), 16)), _FLOAT)
        if array.dtype == types.int16:
            return builder.fpext(builder.bitcast(value, ir.HalfType()), _FLOAT)
        return value

    return types.float32(array, types.intp, slot), generate


@intrinsic(prefer_literal=True)
def store(typing_context: Any, array: Any, index: Any, value: Any, slot: Any) -> Any:
    """`array[index] = value`, rounded to nearest even."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = args[2]
        if array.dtype == types.uint16:
            number = _to_bfloat16(builder, number)
        elif array.dtype == types.int16:
            number = builder.bitcast(builder.fptrunc(number, ir.HalfType()), ir.IntType(16))
        address = _address(context, builder, array, args[0], args[1])
        _annotate(builder, builder.store(number, address), slot.literal_value)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32, slot), generate


_FLOAT = ir.FloatType()


def _to_bfloat16(builder: Any, number: Any) -> Any:
    def constant(value: int) -> Any:
        return ir.Constant(ir.IntType(32), value)

    bits = builder.bitcast(number, ir.IntType(32))
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.add(bits, builder.add(odd, constant(0x7FFF)))
    # Rounding could carry a NaN into infinity, so it gets its own bits.
    is_nan = builder.fcmp_unordered("uno", number, number)
    kept = builder.select(is_nan, constant(0x7FC00000), rounded)
    return builder.trunc(builder.lshr(kept, constant(16)), ir.IntType(16))


@intrinsic(prefer_literal=True)
def _multiply_add(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """`a * b + c` with one rounding; for approximations, never for a neuron's own arithmetic."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


# Through Any: the type of an intrinsic shows its typing context as an argument.
_fma: Any = _multiply_add


@_inline
def _exp_parts(x):
    """(n, p) with exp(x) = 2^n p, for |x| < 105; p is NaN if x is.

    x = n ln 2 + r with |r| <= ln 2 / 2, and p = exp r by the Taylor polynomial of degree 7, whose
    remainder, (ln 2 / 2)^8 / 8!, is below 1e-8.
    """
    n = np.floor(_fma(x, f32(1.4426950408889634), f32(0.5)))
    # ln 2 in two parts; the product of n and the first is exact.
    r = _fma(n, f32(2.12194440054690583e-4), _fma(n, f32(-0.693359375), x))
    p = _fma(f32(1.0 / 5040.0), r, f32(1.0 / 720.0))
    p = _fma(p, r, f32(1.0 / 120.0))
    p = _fma(p, r, f32(1.0 / 24.0))
    p = _fma(p, r, f32(1.0 / 6.0))
    p = _fma(p, r, f32(0.5))
    p = _fma(p, r, f32(1.0))
    p = _fma(p, r, f32(1.0))
    return np.int32(n), p


@_inline
def exp(x):
    """float32 exponential within 2 ulp, of operations that vectorise."""
    # Comparisons in this order let NaN through.
    x = f32(89.0) if f32(89.0) < x else x
    x = f32(-104.0) if f32(-104.0) > x else x
    n, p = _exp_parts(x)
    # 2^n by its exponent bits, in two halves: the smallest and largest results come out right.
    half = n >> np.int32(1)
    scale = np.int32((half + np.int32(127)) << np.int32(23)).view(np.float32)
    rest = np.int32((n - half + np.int32(127)) << np.int32(23)).view(np.float32)
    return p * scale * rest


@_inline
def sigmoid(x):
    """float32 `1 / (1 + exp(-x))` within 4 ulp; 0 where that is subnormal."""
    # At -88.7 the scale becomes infinite, and the result 0.
    x = f32(-88.7) if f32(-88.7) > x else x
    x = f32(87.0) if f32(87.0) < x else x
    n, p = _exp_parts(-x)
    scale = np.int32((n + np.int32(127)) << np.int32(23)).view(np.float32)
    return f32(1.0) / _fma(p, scale, f32(1.0))


@_inline
def channel_rows(row, count, values, first, inner):
    """Spread one value per channel over neurons first ... first + count - 1."""
    for i in range(count):
        row[i] = values[((first + i) // inner) % values.size]


def flat(x: torch.Tensor) -> np.ndarray:
    """The memory of a tensor from its first element to its last, as a 1-d array."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    x = torch.as_strided(x.detach(), (span,), (1,))
    if x.dtype == torch.bfloat16:
        return x.view(torch.uint16).numpy()
    if x.dtype == torch.float16:
        return x.view(torch.int16).numpy()
    return x.numpy()


# From this size on, a fresh tensor costs more in page faults than in arithmetic.
_HUGE = 1 << 22
_PAGE = 1 << 12
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
_MADV_HUGEPAGE = 14


def advise_huge_pages(x: torch.Tensor) -> None:
    """Ask Linux to back a large tensor by 2 MiB pages; where it does not, nothing changes."""
    memory = x.untyped_storage()
    size = memory.nbytes()
    if _madvise is not None and size >= _HUGE:
        start = -(-memory.data_ptr() // _PAGE) * _PAGE
        _madvise(ctypes.c_void_p(start), ctypes.c_size_t(size - _PAGE), _MADV_HUGEPAGE)


# A task shorter than this many neuron-steps is not worth a thread.
MIN_TASK = 1 << 15

_pool: ThreadPoolExecutor | None = None
_pool_size = 0
_lock = threading.Lock()


def _forget_pool() -> None:
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


# Threads don't survive a fork.
os.register_at_fork(after_in_child=_forget_pool)


def parallel(function: Callable[..., None], num_neurons: int, num_steps: int, *args: Any) -> None:
    """Run `function(first, last, *args)` over ranges of neurons on PyTorch's number of threads."""
    global _pool, _pool_size
    threads = min(torch.get_num_threads(), max(1, num_neurons * num_steps // MIN_TASK))
    if threads == 1:
        function(0, num_neurons, *args)
        return
    with _lock:
        if _pool is None or _pool_size < threads:
            # An older, smaller pool finishes its work and goes.
            _pool, _pool_size = ThreadPoolExecutor(threads, "spikefuse"), threads
        pool = _pool
    # Ranges in multiples of a cache line, so that no two threads write to one.
    share = -(-num_neurons // (threads * 16)) * 16
    starts = range(0, num_neurons, share)
    tasks = [pool.submit(function, a, min(a + share, num_neurons), *args) for a in starts]
    for task in tasks:
        task.result()
