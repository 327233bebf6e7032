"""Functions of generated Triton kernels that are single instructions on a GPU."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from spikefuse.kernels.triton_runtime import interpreted

__all__ = ["FAST", "fmod", "multiply", "reciprocal", "round_even", "sigmoid"]

# / and exp take several instructions. The interpreter has no inline assembly or bfloat16 products.
FAST: tl.constexpr = tl.constexpr(torch.version.cuda is not None and not interpreted())


@triton.jit
def reciprocal(x):
    """Approximate `1 / x`."""
    if FAST:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = 1.0 / x
    return y


@triton.jit
def sigmoid(x):
    """Approximate `1 / (1 + exp(-x))`."""
    if FAST:
        e = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;",
            "=f,f",
            [x * -1.4426950408889634],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        e = tl.exp(-x)
    return reciprocal(1.0 + e)


@triton.jit
def round_even(x):
    """Round to the nearest integer, of two equally near ones to the even one."""
    size = tl.abs(x)
    # Values of 2^23 and more are integers, which the sum rounds to.
    whole = tl.where(size < 8388608.0, (size + 8388608.0) - 8388608.0, size)
    return tl.where(x < 0.0, -whole, whole)


@triton.jit
def fmod(x, y):
    """Return the remainder of `x / y`, with the sign of x; exact."""
    if FAST:
        rest = libdevice.fmod(x, y)
    else:
        rest = x % y
    return rest


@triton.jit
def multiply(a, b, total):
    """Add the product of bfloat16 matrices to a float32 matrix."""
    if FAST:
        total = tl.dot(a, b, total)
    else:
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return total
