"""The table of operations that a step may use, with their source text in each language.

All values are scalar float32 or bool; a kernel maps the operations over neurons. An ATen operation
is either a row of `TABLE` or is rewritten into rows by a function in `REWRITES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

aten = torch.ops.aten
Operand = str | float | bool


class UnsupportedOperation(NotImplementedError):
    """A neuron's step uses an operation that kernels do not support."""


@dataclass(frozen=True)
class Op:
    """One row: source text with `{0}`, `{1}`, ... for the operands.

    A rounding error of the operand can change the result of `discontinuous` operations by a step.
    """

    triton: str
    numba: str
    operands: str = "ff"  # one letter per operand: f(loat) or b(ool)
    result: str = "f"
    discontinuous: bool = False
    aten: tuple[Any, ...] = ()


def _both(text: str, **rest: Any) -> Op:
    return Op(text, text, **rest)


def _compare(symbol: str, *packets: Any) -> Op:
    return _both(f"({{0}} {symbol} {{1}})", result="b", aten=packets)


TABLE: dict[str, Op] = {
    "add": _both("({0} + {1})", aten=(aten.add,)),
    "sub": _both("({0} - {1})", aten=(aten.sub,)),
    "mul": _both("({0} * {1})", aten=(aten.mul,)),
    # Division is approximate in Triton by default, but not in PyTorch.
    "div": Op("tl.div_rn({0}, {1})", "({0} / {1})", aten=(aten.div,)),
    # Fused multiply-adds, for gradients only: `a * b + c` and `c - a * b`. In Triton, `-x` is the
    # subtraction `0 - x`; a product with -1 becomes part of the instruction that reads it.
    "fma": Op("tl.fma({0}, {1}, {2})", "fma({0}, {1}, {2})", operands="fff"),
    "fnma": Op("tl.fma({0} * -1.0, {1}, {2})", "fma(-{0}, {1}, {2})", operands="fff"),
    "approximate_div": Op("({0} * reciprocal({1}))", "({0} / {1})"),
    "neg": Op("({0} * -1.0)", "(-{0})", operands="f", aten=(aten.neg,)),
    "abs": Op("tl.abs({0})", "abs({0})", operands="f", aten=(aten.abs,)),
    # Correctly rounded here, but not in every CPU build of PyTorch.
    "sqrt": Op("tl.sqrt_rn({0})", "sqrt({0})", operands="f", aten=(aten.sqrt,)),
    "floor": Op("tl.floor({0})", "floor({0})", "f", discontinuous=True, aten=(aten.floor,)),
    "exp": Op("tl.exp({0})", "exp({0})", operands="f", aten=(aten.exp,)),
    "sigmoid": _both("sigmoid({0})", operands="f", aten=(aten.sigmoid,)),
    "log": Op("tl.log({0})", "log({0})", operands="f", aten=(aten.log,)),
    "maximum": Op(
        "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
        "({0} if {0} > {1} or {0} != {0} else {1})",
        aten=(aten.maximum, aten.clamp_min),
    ),
    "minimum": Op(
        "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
        "({0} if {0} < {1} or {0} != {0} else {1})",
        aten=(aten.minimum, aten.clamp_max),
    ),
    "ge": _compare(">=", aten.ge),
    "gt": _compare(">", aten.gt),
    "le": _compare("<=", aten.le),
    "lt": _compare("<", aten.lt),
    "eq": _compare("==", aten.eq),
    "ne": _compare("!=", aten.ne),
    "and": Op("({0} & {1})", "({0} and {1})", "bb", "b", aten=(aten.logical_and, aten.bitwise_and)),
    "or": Op("({0} | {1})", "({0} or {1})", "bb", "b", aten=(aten.logical_or, aten.bitwise_or)),
    "xor": Op("({0} ^ {1})", "({0} != {1})", "bb", "b", aten=(aten.logical_xor, aten.bitwise_xor)),
    "not": Op("({0} == 0)", "(not {0})", "b", "b", aten=(aten.logical_not, aten.bitwise_not)),
    "where": Op("tl.where({0}, {1}, {2})", "({1} if {0} else {2})", "bff", aten=(aten.where,)),
    "float": Op("{0}.to(tl.float32)", "(f32(1.0) if {0} else f32(0.0))", operands="b"),
    "bool": _both("({0} != 0.0)", operands="f", result="b"),
}

BY_ATEN = {packet: name for name, op in TABLE.items() for packet in op.aten}


class Builder(Protocol):
    """The methods of a graph that rewrites use."""

    def op(self, name: str, *operands: Operand) -> Operand: ...

    def kind(self, operand: Operand) -> str: ...

    def convert(self, wanted: str, operand: Operand) -> Operand: ...


def _cast(b: Builder, x: Operand, dtype: torch.dtype | None = None, **_: Any) -> Operand:
    return x if dtype is None else b.convert("b" if dtype == torch.bool else "f", x)


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


def _tanh(b: Builder, x: Operand) -> Operand:
    # The exponential form cancels near 0, where x times a polynomial in x^2 replaces it.
    size = b.op("abs", x)
    tail = b.op("approximate_div", 2.0, b.op("add", b.op("exp", b.op("add", size, size)), 1.0))
    far = b.op("sub", 1.0, tail)
    far = b.op("where", b.op("lt", x, 0.0), b.op("neg", far), far)
    square = b.op("mul", x, x)
    series: Operand = 62.0 / 2835.0
    for coefficient in (-17.0 / 315.0, 2.0 / 15.0, -1.0 / 3.0, 1.0):
        series = b.op("add", b.op("mul", series, square), coefficient)
    return b.op("where", b.op("lt", size, 0.25), b.op("mul", x, series), far)


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
    if not isinstance(y, str) and float(y).is_integer():
        power = _whole_power(b, x, int(abs(y)))
        return b.op("div", 1.0, power) if y < 0 else power
    if y == 0.5:
        return b.op("sqrt", x)
    if not isinstance(x, str):
        return b.op("exp", b.op("mul", y, math.log(x)))
    return b.op("exp", b.op("mul", y, b.op("log", x)))


def _clamp(
    b: Builder, x: Operand, min: Operand | None = None, max: Operand | None = None
) -> Operand:
    if min is not None:
        x = b.op("maximum", x, min)
    return x if max is None else b.op("minimum", x, max)


def _sign(b: Builder, x: Operand) -> Operand:
    return b.op("sub", b.op("float", b.op("gt", x, 0.0)), b.op("float", b.op("lt", x, 0.0)))


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
    aten._to_copy: _cast,
    aten.reciprocal: lambda b, x: b.op("div", 1.0, x),
    aten.rsqrt: lambda b, x: b.op("div", 1.0, b.op("sqrt", x)),
    aten.sigmoid_backward: lambda b, g, y: b.op("mul", g, b.op("mul", b.op("sub", 1.0, y), y)),
    aten.tanh: _tanh,
    aten.tanh_backward: lambda b, g, y: b.op("mul", g, b.op("sub", 1.0, b.op("mul", y, y))),
    aten.pow: _pow,
    aten.relu: lambda b, x: b.op("maximum", x, 0.0),
    aten.threshold_backward: lambda b, g, x, t: b.op("where", b.op("le", x, t), 0.0, g),
    aten.clamp: _clamp,
    aten.sign: _sign,
    aten.sgn: _sign,
    aten.masked_fill: lambda b, x, mask, value: b.op("where", mask, value, x),
    aten.zeros_like: _constant(0.0),
    aten.ones_like: _constant(1.0),
    aten.full_like: _full,
    aten.full: _full,
    aten.scalar_tensor: lambda b, value, **_: float(value),
    aten.zeros: _constant(0.0),
    aten.ones: _constant(1.0),
}


def refusal(packet: Any, args: Any, kwargs: Any, result: Any) -> str | None:
    """Return why a supported operation cannot be lowered with these arguments, or None."""
    if result.dtype not in (torch.float32, torch.bool):
        return (
            f"it returns a {result.dtype} tensor, but inside step all tensors are float32 or bool"
        )
    if result.ndim:
        return (
            f"it returns a tensor of shape {list(result.shape)}, but a step sees one neuron: make "
            "constants attributes of the neuron, with one value or one per channel"
        )
    if kwargs.get("alpha", 1) not in (1, -1):
        # PyTorch may compute it as a fused multiply-add, which would change spikes.
        return "add and sub with alpha are not supported; write the product"
    if kwargs.get("rounding_mode") is not None:
        return "division with rounding_mode is not supported; use torch.floor"
    if packet is aten.pow and isinstance(args[1], torch.Tensor):
        if isinstance(args[0], torch.Tensor):
            return "the exponent must be a constant, such as an int attribute or a literal"
        if args[0] <= 0:
            return "the base must be positive"
    return None


def is_supported(packet: Any) -> bool:
    """Return whether kernels support this ATen operation."""
    return packet in BY_ATEN or packet in REWRITES


def text(operand: Operand, language: str) -> str:
    """Return a name or a constant as source text."""
    if isinstance(operand, str | bool):
        return str(operand)
    number = repr(float(operand)) if math.isfinite(operand) else f'float("{operand}")'
    return f"f32({number})" if language == "numba" else number
