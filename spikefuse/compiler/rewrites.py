"""ATen operations as rows of the table, and what a step may not compute.

Operations that PyTorch rounds correctly are computed in its order, so that results are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from spikefuse.compiler.ops import BY_ATEN, Builder, Operand

aten = torch.ops.aten


def _cast(b: Builder, x: Operand, dtype: torch.dtype | None = None, **_: Any) -> Operand:
    if dtype is None:
        return x
    is_bool, is_float = b.kind(x) == "b", dtype.is_floating_point
    x = b.convert("b" if dtype == torch.bool else "f", x)
    return x if is_bool or is_float or dtype == torch.bool else _trunc(b, x)


def _scaled(name: str) -> Callable[..., Operand]:
    """Rewrite add or sub, whose ATen forms scale the second operand by `alpha`, 1 or -1."""

    def rewrite(b: Builder, x: Operand, y: Operand, alpha: float = 1) -> Operand:
        if name == "add" and b.kind(x) == b.kind(y) == "b":
            return b.op("or", x, y)
        return b.op(name, x, y if alpha == 1 else b.op("neg", y))

    return rewrite


def _mul(b: Builder, x: Operand, y: Operand) -> Operand:
    if b.kind(x) == b.kind(y) == "b":
        return b.op("and", x, y)
    return b.op("mul", x, y)


# Multiplications take longer than exp and log, and add more error, for greater exponents.
MAX_EXPONENT = 64


def _whole_power(b: Builder, x: Operand, n: int) -> Operand:
    """Compute `x ** n` for n >= 0."""
    if n > MAX_EXPONENT:
        even = b.op("exp", b.op("mul", n - n % 2, b.op("log", b.op("abs", x))))
        return b.op("mul", even, x) if n % 2 else even
    result, square = None, x
    while n:
        if n % 2:
            result = square if result is None else b.op("mul", result, square)
        n //= 2
        square = b.op("mul", square, square) if n else square
    return 1.0 if result is None else result


def _pow(b: Builder, x: Operand, y: Operand) -> Operand:
    """Compute small integer powers by multiplication, others by exp and log, to |y ln x| ulp."""
    if not isinstance(y, str):
        if float(y).is_integer():
            power = _whole_power(b, x, int(abs(y)))
            return b.op("div", 1.0, power) if y < 0 else power
        if y == 0.5:
            return b.op("sqrt", x)
        return b.op("exp", b.op("mul", y, b.op("log", x)))
    if isinstance(x, str):
        log: Operand = b.op("log", b.op("abs", x))
    else:
        log = math.log(abs(x)) if x else -math.inf
    power = b.op("exp", b.op("mul", y, log))
    # Of negative values, odd powers are negative, and those that are not whole do not exist.
    half = b.op("mul", y, 0.5)
    is_whole = b.op("eq", b.op("floor", y), y)
    is_odd = b.op("and", is_whole, b.op("ne", b.op("floor", half), half))
    signed = b.op("where", is_odd, b.op("neg", power), power)
    exists = b.op("or", is_whole, b.op("eq", x, -math.inf))
    signed = b.op("where", exists, signed, math.nan)
    power = b.op("where", b.op("lt", x, 0.0), signed, power)
    is_one = b.op("or", b.op("eq", y, 0.0), b.op("eq", x, 1.0))
    return b.op("where", is_one, 1.0, power)


def _clamp(
    b: Builder, x: Operand, min: Operand | None = None, max: Operand | None = None
) -> Operand:
    if min is not None:
        x = b.op("maximum", x, min)
    return x if max is None else b.op("minimum", x, max)


def _hardtanh_backward(b: Builder, g: Operand, x: Operand, low: float, high: float) -> Operand:
    is_inside = b.op("and", b.op("gt", x, low), b.op("lt", x, high))
    return b.op("where", is_inside, g, 0.0)


def _heaviside(b: Builder, x: Operand, at_zero: Operand) -> Operand:
    return b.op("where", b.op("eq", x, 0.0), at_zero, b.op("float", b.op("gt", x, 0.0)))


def _sign(b: Builder, x: Operand) -> Operand:
    return b.op("sub", b.op("float", b.op("gt", x, 0.0)), b.op("float", b.op("lt", x, 0.0)))


def _signed(b: Builder, size: Operand, x: Operand) -> Operand:
    """Return `size` with the sign of x, which for 0 is that of `size`."""
    return b.op("where", b.op("lt", x, 0.0), b.op("neg", size), size)


def _series(b: Builder, x: Operand, *coefficients: float) -> Operand:
    """Evaluate a polynomial of x, the highest power first."""
    first, *others = coefficients
    total: Operand = first
    for coefficient in others:
        total = b.op("add", b.op("mul", total, x), coefficient)
    return total


def _ceil(b: Builder, x: Operand) -> Operand:
    return b.op("neg", b.op("floor", b.op("neg", x)))


def _trunc(b: Builder, x: Operand) -> Operand:
    return _signed(b, b.op("floor", b.op("abs", x)), x)


def _remainder(b: Builder, x: Operand, y: Operand) -> Operand:
    rest = b.op("fmod", x, y)
    return b.op("where", _differs(b, rest, y), b.op("add", rest, y), rest)


def _differs(b: Builder, rest: Operand, y: Operand) -> Operand:
    """Whether a remainder that is not 0 has another sign than the divisor."""
    signs = b.op("xor", b.op("lt", rest, 0.0), b.op("lt", y, 0.0))
    return b.op("and", b.op("ne", rest, 0.0), signs)


def _div(b: Builder, x: Operand, y: Operand, rounding_mode: str | None = None) -> Operand:
    quotient = b.op("div", x, y)
    if rounding_mode is None:
        return quotient
    if rounding_mode == "trunc":
        return _trunc(b, quotient)
    rest = b.op("fmod", x, y)  # the quotient itself may be rounded up to an integer
    whole = b.op("div", b.op("sub", x, rest), y)
    whole = b.op("where", _differs(b, rest, y), b.op("sub", whole, 1.0), whole)
    floor = b.op("floor", whole)
    above = b.op("gt", b.op("sub", whole, floor), 0.5)
    floor = b.op("where", above, b.op("add", floor, 1.0), floor)
    return b.op("where", b.op("eq", y, 0.0), quotient, floor)


def _tanh(b: Builder, x: Operand) -> Operand:
    # The exponential form cancels near 0, where x times a polynomial in x^2 replaces it.
    size = b.op("abs", x)
    tail = b.op("approximate_div", 2.0, b.op("add", b.op("exp", b.op("add", size, size)), 1.0))
    far = _signed(b, b.op("sub", 1.0, tail), x)
    near = b.op("mul", x, _series(b, b.op("mul", x, x), 62 / 2835, -17 / 315, 2 / 15, -1 / 3, 1.0))
    return b.op("where", b.op("lt", size, 0.25), near, far)


def _expm1(b: Builder, x: Operand) -> Operand:
    series = _series(b, x, *(1 / math.factorial(n) for n in range(9, 0, -1)))
    near = b.op("lt", b.op("abs", x), 0.5)
    return b.op("where", near, b.op("mul", x, series), b.op("sub", b.op("exp", x), 1.0))


def _log1p(b: Builder, x: Operand) -> Operand:
    # Source: Higham, "Accuracy and Stability of Numerical Algorithms", problem 1.5: the rounding
    # error of 1 + x cancels in the quotient.
    total = b.op("add", 1.0, x)
    log, rounded = b.op("log", total), b.op("sub", total, 1.0)
    far = b.op("where", b.op("eq", rounded, x), log, b.op("div", b.op("mul", log, x), rounded))
    return b.op("where", b.op("eq", rounded, 0.0), x, far)


def _ordered(b: Builder, x: Operand, y: Operand) -> tuple[Operand, Operand, Operand]:
    """Return whether |x| > |y|, and the lesser and the greater of them."""
    x, y = b.op("abs", x), b.op("abs", y)
    return b.op("gt", x, y), b.op("minimum", x, y), b.op("maximum", x, y)


def _atan2(b: Builder, y: Operand, x: Operand) -> Operand:
    # Source: Moshier, Cephes, atanf.c: a polynomial for angles up to pi / 8.
    is_steep, low, high = _ordered(b, y, x)
    is_far = b.op("gt", low, b.op("mul", high, math.sqrt(2) - 1))
    is_far = b.op("or", is_far, b.op("eq", low, high))
    turned = b.op("div", b.op("sub", low, high), b.op("add", low, high))
    turned = b.op("where", b.op("eq", low, high), 0.0, turned)
    ratio = b.op("where", is_far, turned, b.op("div", low, high))
    square = b.op("mul", ratio, ratio)
    series = _series(b, square, 8.05374449538e-2, -1.38776856032e-1, 1.99777106478e-1,
                     -3.33329491539e-1)  # fmt: skip
    angle = b.op("add", b.op("mul", b.op("mul", series, square), ratio), ratio)
    angle = b.op("add", angle, b.op("where", is_far, math.pi / 4, 0.0))
    angle = b.op("where", b.op("eq", high, 0.0), 0.0, angle)
    angle = b.op("where", is_steep, b.op("sub", math.pi / 2, angle), angle)
    angle = b.op("where", b.op("lt", x, 0.0), b.op("sub", math.pi, angle), angle)
    return _signed(b, angle, y)


def _hypot(b: Builder, x: Operand, y: Operand) -> Operand:
    _, low, high = _ordered(b, x, y)
    ratio = b.op("div", low, high)
    length = b.op("mul", high, b.op("sqrt", b.op("add", b.op("mul", ratio, ratio), 1.0)))
    length = b.op("where", b.op("eq", low, 0.0), high, length)
    sizes = b.op("abs", x), b.op("abs", y)
    is_infinite = b.op("or", *(b.op("eq", size, math.inf) for size in sizes))
    return b.op("where", is_infinite, math.inf, length)


def _softplus(b: Builder, x: Operand, beta: float = 1.0, threshold: float = 20.0) -> Operand:
    scaled = b.op("mul", x, beta)
    soft = b.op("div", _log1p(b, b.op("exp", scaled)), beta)
    return b.op("where", b.op("gt", scaled, threshold), x, soft)


def _softplus_backward(
    b: Builder, g: Operand, x: Operand, beta: float, threshold: float
) -> Operand:
    scaled = b.op("mul", x, beta)
    soft = b.op("mul", g, b.op("sigmoid", scaled))
    return b.op("where", b.op("gt", scaled, threshold), g, soft)


def _silu_backward(b: Builder, g: Operand, x: Operand) -> Operand:
    s = b.op("sigmoid", x)
    slope = b.op("add", 1.0, b.op("mul", x, b.op("sub", 1.0, s)))
    return b.op("mul", g, b.op("mul", s, slope))


_TANH_GELU = math.sqrt(2 / math.pi), 0.044715


def _gelu_gate(b: Builder, x: Operand, approximate: str) -> Operand:
    """Return twice the factor of x, `1 + erf(x / sqrt(2))` or its approximation by tanh."""
    if approximate == "none":
        return b.op("add", 1.0, b.op("erf", b.op("mul", x, math.sqrt(0.5))))
    scale, cubic = _TANH_GELU
    cube = b.op("mul", b.op("mul", b.op("mul", x, x), x), cubic)
    return b.op("add", 1.0, _tanh(b, b.op("mul", scale, b.op("add", x, cube))))


def _gelu(b: Builder, x: Operand, approximate: str = "none") -> Operand:
    return b.op("mul", b.op("mul", x, 0.5), _gelu_gate(b, x, approximate))


def _gelu_backward(b: Builder, g: Operand, x: Operand, approximate: str = "none") -> Operand:
    gate, square = _gelu_gate(b, x, approximate), b.op("mul", x, x)
    if approximate == "none":
        bell = b.op("exp", b.op("mul", square, -0.5))
        slope = b.op("mul", bell, math.sqrt(2 / math.pi))
    else:
        scale, cubic = _TANH_GELU
        slope = b.op("mul", gate, b.op("sub", 2.0, gate))  # of tanh
        slope = b.op("mul", slope, b.op("add", scale, b.op("mul", square, 3 * scale * cubic)))
    total = b.op("add", gate, b.op("mul", x, slope))
    return b.op("mul", g, b.op("mul", 0.5, total))


def _leaky_relu(b: Builder, x: Operand, slope: float = 0.01) -> Operand:
    return b.op("where", b.op("gt", x, 0.0), x, b.op("mul", x, slope))


def _leaky_relu_backward(
    b: Builder, g: Operand, x: Operand, slope: float, is_result: bool
) -> Operand:
    return b.op("where", b.op("gt", x, 0.0), g, b.op("mul", g, slope))


def _elu(
    b: Builder, x: Operand, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0
) -> Operand:
    low = b.op("mul", _expm1(b, b.op("mul", x, input_scale)), alpha * scale)
    return b.op("where", b.op("lt", x, 0.0), low, b.op("mul", x, scale))


def _elu_backward(
    b: Builder,
    g: Operand,
    alpha: float,
    scale: float,
    input_scale: float,
    is_result: bool,
    x: Operand,
) -> Operand:
    factor = alpha * scale
    if is_result:
        low = b.op("mul", input_scale, b.op("add", x, factor))
    else:
        low = b.op("mul", input_scale * factor, b.op("exp", b.op("mul", x, input_scale)))
    return b.op("mul", g, b.op("where", b.op("le", x, 0.0), low, scale))


def _lerp(b: Builder, x: Operand, y: Operand, weight: Operand) -> Operand:
    # From the nearer end, as in PyTorch.
    difference = b.op("sub", y, x)
    start = b.op("add", x, b.op("mul", weight, difference))
    end = b.op("sub", y, b.op("mul", difference, b.op("sub", 1.0, weight)))
    return b.op("where", b.op("lt", b.op("abs", weight), 0.5), start, end)


def _full(b: Builder, _: Any, value: float, dtype: torch.dtype | None = None, **__: Any) -> Operand:
    return bool(value) if dtype == torch.bool else float(value)


def _constant(value: float) -> Callable[..., Operand]:
    return lambda b, shape, **options: _full(b, shape, value, **options)


_IDENTITIES = aten.detach, aten.alias, aten.clone, aten.lift_fresh, aten.lift_fresh_copy
REWRITES: dict[Any, Callable[..., Operand]] = {
    **dict.fromkeys(_IDENTITIES, lambda b, x, **_: x),
    aten.add: _scaled("add"),
    aten.sub: _scaled("sub"),
    aten.rsub: lambda b, x, y, alpha=1: _scaled("sub")(b, y, x, alpha),
    aten.mul: _mul,
    aten.div: _div,
    aten.floor_divide: lambda b, x, y: _div(b, x, y, "floor"),
    aten.remainder: _remainder,
    aten.round: lambda b, x: b.op("round", x),
    aten.ceil: _ceil,
    aten.trunc: _trunc,
    aten._to_copy: _cast,
    aten.reciprocal: lambda b, x: b.op("div", 1.0, x),
    aten.rsqrt: lambda b, x: b.op("div", 1.0, b.op("sqrt", x)),
    aten.sigmoid_backward: lambda b, g, y: b.op("mul", g, b.op("mul", b.op("sub", 1.0, y), y)),
    aten.tanh: _tanh,
    aten.tanh_backward: lambda b, g, y: b.op("mul", g, b.op("sub", 1.0, b.op("mul", y, y))),
    aten.pow: _pow,
    aten.expm1: _expm1,
    aten.log1p: _log1p,
    aten.tan: lambda b, x: b.op("div", b.op("sin", x), b.op("cos", x)),
    aten.atan: lambda b, x: _atan2(b, x, 1.0),
    aten.atan2: _atan2,
    aten.hypot: _hypot,
    aten.softplus: _softplus,
    aten.softplus_backward: _softplus_backward,
    aten.silu: lambda b, x: b.op("mul", x, b.op("sigmoid", x)),
    aten.silu_backward: _silu_backward,
    aten.gelu: _gelu,
    aten.gelu_backward: _gelu_backward,
    aten.leaky_relu: _leaky_relu,
    aten.leaky_relu_backward: _leaky_relu_backward,
    aten.elu: _elu,
    aten.elu_backward: _elu_backward,
    aten.lerp: _lerp,
    aten.relu: lambda b, x: b.op("maximum", x, 0.0),
    aten.threshold: lambda b, x, t, value: b.op("where", b.op("le", x, t), value, x),
    aten.threshold_backward: lambda b, g, x, t: b.op("where", b.op("le", x, t), 0.0, g),
    aten.clamp: _clamp,
    aten.hardtanh: lambda b, x, low=-1.0, high=1.0: _clamp(b, x, low, high),
    aten.hardtanh_backward: _hardtanh_backward,
    aten.heaviside: _heaviside,
    aten.sign: _sign,
    aten.sgn: _sign,
    aten.masked_fill: lambda b, x, mask, value: b.op("where", mask, value, x),
    aten.zeros_like: _constant(0.0),
    aten.ones_like: _constant(1.0),
    aten.full_like: _full,
    aten.empty_like: _constant(0.0),
    aten.fill: lambda b, x, value: value,
    aten.full: _full,
    aten.scalar_tensor: lambda b, value, **_: float(value),
    aten.zeros: _constant(0.0),
    aten.ones: _constant(1.0),
}

#: Operations of derivatives only: a step would leave memory unwritten.
IN_GRADIENTS = aten.empty_like, aten.fill


def refusal(packet: Any, args: Any, kwargs: Any, result: Any) -> str | None:
    """Return why a supported operation cannot be lowered with these arguments, or None."""
    # Integers are float32 here, and exact up to 2^24.
    whole = result.dtype in (torch.int32, torch.int64) and not packet.__name__.startswith("bitwise")
    if not whole and result.dtype not in (torch.float32, torch.bool):
        return (
            f"it returns a {result.dtype} tensor, but inside step all tensors are float32 or bool"
        )
    if result.ndim:
        advice = "make constants attributes of the neuron, with one value or one per channel"
        if result.numel() == 1:
            advice = (
                "write a constant of one value as a number, which an autograd.Function keeps as an "
                "attribute of ctx"
            )
        shape = list(result.shape)
        return f"it returns a tensor of shape {shape}, but a step sees one neuron: {advice}"
    if kwargs.get("alpha", 1) not in (1, -1):
        # PyTorch may compute it as a fused multiply-add, which would change spikes.
        return "add and sub with alpha are not supported; write the product"
    if kwargs.get("decimals"):
        return "rounding to decimals is not supported; scale the value"
    return None


def is_supported(packet: Any) -> bool:
    """Return whether kernels support this ATen operation."""
    return packet in BY_ATEN or packet in REWRITES
