"""float32 functions of generated Numba kernels, of operations that vectorise."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

f32 = np.float32
# NumPy's keep float32; those of math would compute in double precision.
floor, log, sqrt = np.floor, np.log, np.sqrt

_inline = numba.njit(inline="always", error_model="numpy")


@intrinsic
def _multiply_add(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """`a * b + c` with one rounding; for approximations and gradients, never for a step itself."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


# Through Any: the type of an intrinsic shows its typing context as an argument.
fma: Any = _multiply_add


# Adding it rounds to a whole number, which stands in the low bits, with the bias of an exponent.
_ROUND = f32(1.5 * 2**23 + 127)
_ROUND_BITS = np.int32(_ROUND.view(np.int32))


@_inline
def _exp_parts(x):
    """(m, p) with exp(x) = 2^n p and m = _ROUND + n, for |x| < 105; p is NaN if x is.

    x = n ln 2 + r with |r| <= ln 2 / 2, and p is the polynomial 1 + r + c2 r^2 + ... + c6 r^6 of
    least maximal relative error, 3e-9, found by Lawson's reweighted least squares.
    """
    m = fma(x, f32(1.4426950408889634), _ROUND)
    n = m - _ROUND
    # ln 2 in two parts; the product of n and the first is exact.
    r = fma(n, f32(2.12194440054690583e-4), fma(n, f32(-0.693359375), x))
    square = r * r
    p = fma(f32(1.3814540e-3), square, fma(f32(8.3687454e-3), r, f32(4.1668389e-2)))
    p = fma(p, square, fma(f32(1.6666521e-1), r, f32(4.9999994e-1)))
    return m, fma(p, square, r) + f32(1.0)


@_inline
def exp(x):
    """float32 exponential within 2 ulp, of operations that vectorise."""
    # Comparisons in this order let NaN through.
    x = f32(89.0) if f32(89.0) < x else x
    x = f32(-104.0) if f32(-104.0) > x else x
    m, p = _exp_parts(x)
    n = np.float32(m).view(np.int32) - _ROUND_BITS
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
    m, p = _exp_parts(-x)
    scale = np.int32(np.float32(m).view(np.int32) << np.int32(23)).view(np.float32)
    return f32(1.0) / fma(p, scale, f32(1.0))
