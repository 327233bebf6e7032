"""The table of operations that a step may use, with their source text in each language.

All values are scalar float32 or bool; a kernel maps the operations over neurons. An ATen operation
is either a row of `TABLE` or is rewritten into rows, see `spikefuse.compiler.rewrites`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch

aten = torch.ops.aten
Operand = str | float | bool


class UnsupportedOperation(NotImplementedError):
    """A neuron's step uses an operation that kernels do not support.

    Example::

        class Sorted(sf.Neuron):
            def step(self, x):
                return x.sort().values, ()

        try:
            y = Sorted()(torch.rand(8, 32, 128))
        except sf.UnsupportedOperation:
            y = Sorted()(torch.rand(8, 32, 128), impl="reference")
    """


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
    "div": Op("tl.div_rn({0}, {1})", "({0} / {1})"),
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
    # Of two equally near integers, the even one.
    "round": _both("round_even({0})", operands="f", discontinuous=True),
    "fmod": _both("fmod({0}, {1})", discontinuous=True, aten=(aten.fmod,)),
    "exp": Op("tl.exp({0})", "exp({0})", operands="f", aten=(aten.exp,)),
    "sigmoid": _both("sigmoid({0})", operands="f", aten=(aten.sigmoid,)),
    "log": Op("tl.log({0})", "log({0})", operands="f", aten=(aten.log,)),
    "log2": Op("tl.log2({0})", "log2({0})", operands="f", aten=(aten.log2,)),
    "sin": Op("tl.sin({0})", "sin({0})", operands="f", aten=(aten.sin,)),
    "cos": Op("tl.cos({0})", "cos({0})", operands="f", aten=(aten.cos,)),
    "erf": Op("tl.erf({0})", "erf({0})", operands="f", aten=(aten.erf,)),
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


def text(operand: Operand, language: str) -> str:
    """Return a name or a constant as source text."""
    if isinstance(operand, str | bool):
        return str(operand)
    number = repr(float(operand)) if math.isfinite(operand) else f'float("{operand}")'
    return f"f32({number})" if language == "numba" else number
