"""float32 math functions for generated Numba kernels, built from operations that vectorize."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

f32 = np.float32
# NumPy functions compute in float32, those of math in double precision.
floor, log, log2, sqrt = np.floor, np.log, np.log2, np.sqrt
round_even, fmod, sin, cos = np.rint, np.fmod, np.sin, np.cos
erf = math.erf

# Inlined by LLVM, because Numba's own inlining makes kernels larger before types are inferred.
_inline = numba.njit(error_model="numpy", forceinline=True)


@intrinsic
def _multiply_add(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """Compute `a * b + c` with one rounding, for approximations and gradients, not for a step."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


# Typed as Any because the signature of an intrinsic includes its typing context.
fma: Any = _multiply_add


# Adding it rounds to an integer, held in the low bits together with the exponent bias.
_ROUND = f32(1.5 * 2**23 + 127)
_ROUND_BITS = np.int32(_ROUND.view(np.int32))


@_inline
def _exp_parts(x):
    """Return (m, p) with exp(x) = 2^n p and m = _ROUND + n, for |x| < 105; p is NaN if x is.

    x = n ln 2 + r with |r| <= ln 2 / 2, and p is the minimax polynomial 1 + r + c2 r^2 + ... +
    c6 r^6, with a maximum relative error of 3e-9, found by Lawson's reweighted least squares.
    """
    m = fma(x, f32(1.4426950408889634), _ROUND)
    n = m - _ROUND
    # ln 2 is split in two; the product of n and the first part is exact.
    r = fma(n, f32(2.12194440054690583e-4), fma(n, f32(-0.693359375), x))
    square = r * r
    p = fma(f32(1.3814540e-3), square, fma(f32(8.3687454e-3), r, f32(4.1668389e-2)))
    p = fma(p, square, fma(f32(1.6666521e-1), r, f32(4.9999994e-1)))
    return m, fma(p, square, r) + f32(1.0)


@_inline
def exp(x):
    """Compute the float32 exponential to within 2 ulp."""
    # Comparisons in this order propagate NaN.
    x = f32(89.0) if f32(89.0) < x else x
    x = f32(-104.0) if f32(-104.0) > x else x
    m, p = _exp_parts(x)
    n = np.float32(m).view(np.int32) - _ROUND_BITS
    # Set the exponent bits of 2^n in two halves, so that subnormal and huge results are correct.
    half = n >> np.int32(1)
    scale = np.int32((half + np.int32(127)) << np.int32(23)).view(np.float32)
    rest = np.int32((n - half + np.int32(127)) << np.int32(23)).view(np.float32)
    return p * scale * rest


@_inline
def sigmoid(x):
    """Compute the float32 `1 / (1 + exp(-x))` to within 4 ulp; subnormal results become 0."""
    # At -88.7 the scale overflows to infinity, and the result is 0.
    x = f32(-88.7) if f32(-88.7) > x else x
    x = f32(87.0) if f32(87.0) < x else x
    m, p = _exp_parts(-x)
    scale = np.int32(np.float32(m).view(np.int32) << np.int32(23)).view(np.float32)
    return f32(1.0) / fma(p, scale, f32(1.0))
