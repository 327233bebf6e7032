"""Every operation of the table on every backend, against PyTorch and against float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spikefuse import Neuron
from spikefuse.compiler import ops, rewrites
from spikefuse.compiler.trace import trace_step

aten = torch.ops.aten
Function = Callable[[Tensor, Tensor], Tensor]


def _as_float(packet: Any) -> tuple[Function, ...]:
    """Apply a bool operation to two comparisons."""
    return (lambda x, y: packet(x > 0.5, y > x),)


def near(x: Tensor) -> Tensor:
    """Neither small nor great values."""
    return torch.clamp(torch.where(torch.abs(x) < 1e-3, 1.0, x), -999.0, 999.0)


# By ATen operation, in the spelling that a user would write.
EXACT: dict[Any, tuple[Function, ...]] = {
    # Other factors are refused, because PyTorch may compute a fused multiply-add.
    aten.add: (
        lambda x, y: x + y,
        lambda x, y: 0.1 + x,
        lambda x, y: torch.add(x, y, alpha=-1),
        lambda x, y: x + (y > x),
        lambda x, y: (x > 0.5) + (y > x),
    ),
    aten.sub: (lambda x, y: x - y, lambda x, y: torch.sub(x, y, alpha=-1)),
    aten.rsub: (lambda x, y: 0.3 - x, lambda x, y: torch.rsub(x, y, alpha=-1)),
    aten.mul: (
        lambda x, y: x * y,
        lambda x, y: x * 0.1,
        lambda x, y: x * (y > x),
        lambda x, y: (x > 0.5) * (y > x),
        lambda x, y: x * torch.tensor(0.3),
    ),
    aten.div: (
        lambda x, y: x / y,
        lambda x, y: x / 3,
        lambda x, y: (x > y) / 3.0,
        lambda x, y: torch.div(near(x), near(y), rounding_mode="floor"),
        lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    ),
    aten.neg: (lambda x, y: -x,),
    aten.abs: (lambda x, y: torch.abs(x), lambda x, y: abs(x - y)),
    aten.floor: (lambda x, y: torch.floor(x),),
    aten.ceil: (lambda x, y: torch.ceil(x),),
    aten.trunc: (lambda x, y: torch.trunc(x),),
    aten.round: (lambda x, y: torch.round(x), lambda x, y: torch.round(x + 0.5)),
    # PyTorch has NaN for remainders of great quotients.
    aten.fmod: (lambda x, y: torch.fmod(near(x), near(y)), lambda x, y: torch.fmod(near(x), 0.3)),
    aten.remainder: (lambda x, y: near(x) % near(y), lambda x, y: (6.25 % near(y)).detach()),
    aten.floor_divide: (lambda x, y: (near(x) // 0.1).detach(),),
    aten.maximum: (torch.maximum, lambda x, y: torch.maximum(y, 0.5 * x)),
    aten.minimum: (torch.minimum, lambda x, y: torch.minimum(y, 0.5 * x)),
    aten.ge: (lambda x, y: x >= y, lambda x, y: x >= 0.5),
    aten.gt: (lambda x, y: x > y, lambda x, y: x > -1),
    aten.le: (lambda x, y: x <= y, lambda x, y: x <= 0.5),
    aten.lt: (lambda x, y: x < y, lambda x, y: x < math.inf),
    aten.eq: (lambda x, y: x == y, lambda x, y: (x > 0) == (y > 0)),
    aten.ne: (lambda x, y: x != y, lambda x, y: x != x),
    aten.logical_and: (*_as_float(torch.logical_and), torch.logical_and),
    aten.bitwise_and: _as_float(lambda a, b: a & b),
    aten.logical_or: (*_as_float(torch.logical_or), torch.logical_or),
    aten.bitwise_or: _as_float(lambda a, b: a | b),
    aten.logical_xor: (*_as_float(torch.logical_xor), torch.logical_xor),
    aten.bitwise_xor: _as_float(lambda a, b: a ^ b),
    aten.logical_not: (lambda x, y: torch.logical_not(x > y), lambda x, y: torch.logical_not(x)),
    aten.bitwise_not: (lambda x, y: ~(x > y),),
    aten.where: (
        lambda x, y: torch.where(x > y, x, -y),
        lambda x, y: torch.where(x > y, 1.0, -2.0),
        lambda x, y: torch.where(x > y, y > 0, x < 0),
        lambda x, y: x * torch.where(x > y, 3, torch.where(y > 0, 2, 0)),
        lambda x, y: (x > y).int() + 1,
    ),
    aten.detach: (lambda x, y: x.detach(),),
    aten.alias: (lambda x, y: aten.alias(x),),
    aten.clone: (lambda x, y: x.clone(),),
    aten.lift_fresh: (lambda x, y: x - torch.tensor(0.7),),
    aten.lift_fresh_copy: (lambda x, y: aten.lift_fresh_copy(x),),
    aten._to_copy: (
        lambda x, y: (x > y).float(),
        lambda x, y: x.to(torch.bool),
        lambda x, y: aten._to_copy(x),
        lambda x, y: torch.clamp(torch.where(x == x, x, 0.0), -9.0, 9.0).long() / 2,
    ),
    aten.reciprocal: (lambda x, y: torch.reciprocal(x), lambda x, y: 2 / x),
    aten.relu: (lambda x, y: torch.relu(x),),
    aten.leaky_relu: (lambda x, y: F.leaky_relu(x), lambda x, y: F.leaky_relu(x, -0.3)),
    aten.leaky_relu_backward: (lambda x, y: aten.leaky_relu_backward(x, y, 0.25, False),),
    aten.lerp: (
        lambda x, y: torch.lerp(near(x), near(y), 0.75),
        lambda x, y: torch.lerp(near(x), near(y), 0.25),
    ),
    aten.threshold: (lambda x, y: F.threshold(x, 0.25, -3.0),),
    aten.threshold_backward: (lambda x, y: aten.threshold_backward(x, y, 0.25),),
    aten.clamp: (
        lambda x, y: torch.clamp(x, -1.0, 2.0),
        lambda x, y: x.clamp(min=0.5),
        lambda x, y: x.clamp(max=y),
    ),
    aten.hardtanh: (lambda x, y: F.relu6(x), lambda x, y: F.hardtanh(x, -0.5, 2.0)),
    aten.hardtanh_backward: (lambda x, y: aten.hardtanh_backward(x, y, -0.5, 2.0),),
    # It has no derivative, so that it is called in functions that have their own.
    aten.heaviside: (lambda x, y: torch.heaviside(x.detach(), y.detach()),),
    aten.clamp_min: (lambda x, y: torch.clamp_min(x, -0.5), lambda x, y: torch.clamp_min(x, y)),
    aten.clamp_max: (lambda x, y: torch.clamp_max(x, 0.5), lambda x, y: torch.clamp_max(x, y)),
    aten.sign: (lambda x, y: torch.sign(torch.where(x == x, x, 0.0)),),
    # Only as the derivative of abs: its own derivative creates special zero tensors.
    aten.sgn: (lambda x, y: torch.sgn(torch.where(x == x, x, 0.0).detach()),),
    aten.masked_fill: (lambda x, y: x.masked_fill(y > 0, -math.inf),),
    aten.zeros_like: (lambda x, y: x + torch.zeros_like(x),),
    aten.ones_like: (lambda x, y: torch.ones_like(x), lambda x, y: torch.ones_like(x > y)),
    aten.full_like: (lambda x, y: torch.full_like(x, 0.1),),
    aten.full: (lambda x, y: x + torch.full((), 0.1),),
    aten.scalar_tensor: (lambda x, y: x + torch.scalar_tensor(0.1),),
    aten.zeros: (lambda x, y: x + torch.zeros(()),),
    aten.ones: (lambda x, y: x - torch.ones(()),),
}

# In gradients only, which test_adjoint.py compares.
IN_GRADIENTS = (
    *(aten.softplus_backward, aten.silu_backward, aten.gelu_backward, aten.elu_backward),
    *rewrites.IN_GRADIENTS,
)

# By operation: the function, its error bound in float32 ulp, and the absolute error to ignore.
SMALLEST = 2.0**-126  # a result below it is subnormal
INEXACT: dict[Any, tuple[Function, float, float]] = {
    aten.exp: (lambda x, y: torch.exp(x), 2, 0),
    aten.log: (lambda x, y: torch.log(x), 4, 0),  # as in NumPy and CUDA
    aten.log2: (lambda x, y: torch.log2(x), 4, 0),
    aten.log1p: (lambda x, y: torch.log1p(x), 6, SMALLEST),
    aten.expm1: (lambda x, y: torch.expm1(x), 5, SMALLEST),
    aten.sin: (lambda x, y: torch.sin(x), 4, SMALLEST),
    aten.cos: (lambda x, y: torch.cos(x), 4, SMALLEST),
    aten.tan: (lambda x, y: torch.tan(x), 8, SMALLEST),
    aten.erf: (lambda x, y: torch.erf(x), 2, SMALLEST),
    aten.atan: (lambda x, y: torch.atan(x), 4, SMALLEST),
    # Signs of zero are not those of PyTorch.
    aten.atan2: (lambda x, y: torch.atan2(x + 0.0, y + 0.0), 4, SMALLEST),
    aten.hypot: (torch.hypot, 3, SMALLEST),
    aten.softplus: (lambda x, y: F.softplus(x), 8, SMALLEST),
    aten.silu: (lambda x, y: F.silu(x), 6, SMALLEST),
    aten.gelu: (lambda x, y: F.gelu(torch.where(x < -2.0, 0.0, x)), 16, SMALLEST),
    aten.elu: (lambda x, y: F.elu(x, 0.75), 6, SMALLEST),
    aten.sqrt: (lambda x, y: torch.sqrt(x), 0.5, 0),
    aten.rsqrt: (lambda x, y: torch.rsqrt(x), 2, 0),
    aten.sigmoid: (lambda x, y: torch.sigmoid(x), 4, SMALLEST),
    aten.sigmoid_backward: (lambda x, y: aten.sigmoid_backward(x, y), 3, SMALLEST),
    aten.tanh: (lambda x, y: torch.tanh(x), 4, 0),
    aten.tanh_backward: (lambda x, y: aten.tanh_backward(x, y), 3, SMALLEST),
}


def edges() -> Tensor:
    """Zeros, subnormals, the largest numbers, infinities, NaN, ties and thresholds."""
    positive = [0.0, 1e-45, 1e-40, 2.0**-126, 1e-8, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    positive += [16777217.0, 3.7e9, 1e30, 3.4028234663852886e38, math.inf]
    return torch.tensor([*positive, *(-v for v in positive), math.nan])


def pairs(count: int = 300) -> tuple[Tensor, Tensor]:
    """All pairs of edge cases, and random pairs of every magnitude: two inputs [1, N]."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, count, generator=generator) for _ in range(2))
    drawn = x * torch.exp2(y.mul(20).round())
    drawn[1, ::2] = drawn[0, ::2] * (1 + x[1, ::2].mul(2).round() * 2.0**-23)  # neighbours
    crossed = torch.tensor(list(itertools.product(edges().tolist(), repeat=2))).t()
    both = torch.cat([crossed, drawn, torch.randn(2, count, generator=generator)], dim=1)
    return both[0][None], both[1][None]


ROWS = [(packet, f) for packet, functions in EXACT.items() for f in functions]
PARTS = 4


class Exact(Neuron):
    """One output per function of EXACT, in several parts, which compile faster than one."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def step(self, x, y):
        return tuple(f(x, y) for _, f in ROWS[self.part :: PARTS]), ()


class Inexact(Neuron):
    """One output per function of INEXACT."""

    def step(self, x, y):
        return tuple(f(x, y) for f, *_ in INEXACT.values()), ()


class Powers(Neuron):
    """`x` to the exponents of an attribute, and 2 to the power x."""

    def __init__(self, *exponents):
        super().__init__()
        self.exponents = exponents

    def step(self, x):
        return (torch.square(x), *(x**n for n in self.exponents), 2.0**x), ()


def same(a: Tensor, b: Tensor) -> Tensor:
    """Return where two tensors are equal; NaN equals NaN, and -0 equals 0."""
    return (a == b) | (a.isnan() & b.isnan())


def ulp(x: Tensor) -> Tensor:
    """Return the spacing of float32 numbers near the float64 `x`."""
    exponent = torch.frexp(x.abs().clamp(min=SMALLEST)).exponent - 24
    return torch.ldexp(torch.ones_like(x), exponent)


def errors(actual: Tensor, truth: Tensor, negligible: float = 0.0) -> Tensor:
    """Return the error of float32 results in ulp; infinities and NaN must match the truth."""
    rounded = truth.float()
    special = ~rounded.isfinite()
    assert same(actual, rounded)[special].all()
    overflow = actual.isinf() & ~special
    assert (truth.abs()[overflow] > 3.4e38).all()
    error = (actual.double() - truth).abs()
    error = torch.where(special | overflow | (error <= negligible), 0.0, error)
    return error / ulp(torch.where(special, 1.0, truth))


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.packets: set[Any] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.packets.add(func.overloadpacket)
        return func(*args, **(kwargs or {}))


def test_each_function_calls_its_operation():
    x, y = torch.rand(3), torch.rand(3)
    everything = {**EXACT, **{packet: row[:1] for packet, row in INEXACT.items()}}
    for packet, functions in everything.items():
        with Recorder() as recorder:
            for f in functions:
                f(x, y)
        assert packet in recorder.packets, packet


def test_every_operation_and_row_is_covered():
    known = {*ops.BY_ATEN, *rewrites.REWRITES}
    assert known == {*EXACT, *INEXACT, *IN_GRADIENTS, aten.pow}
    rows = set()
    for neuron in (*map(Exact, range(PARTS)), Inexact(), Powers(-1, 0.5)):
        rows |= {node.op for node in trace_step(neuron).graph.nodes}
    # Fused multiply-adds occur only in gradients, which test_adjoint.py covers.
    assert rows | {"fma", "fnma"} == set(ops.TABLE)


@pytest.mark.parametrize("part", range(PARTS))
def test_exact_operations_equal_torch(part, backends):
    neuron = Exact(part)
    x, y = (v.to(backends.device) for v in pairs())
    for impl in backends.impls:
        for (packet, f), a in zip(ROWS[part::PARTS], neuron(x, y, impl=impl), strict=True):
            e = f(x, y).float().expand_as(x)
            wrong = ~same(a, e)
            assert not wrong.any(), (
                f"{impl}: {packet} of {x[wrong][0]}, {y[wrong][0]} is {a[wrong][0]}, "
                f"torch says {e[wrong][0]}"
            )


def test_inexact_operations_are_within_their_bounds(backends):
    x, y = (v.to(backends.device) for v in pairs())
    # The arguments of derivatives are gradients and results, which are moderate.
    grad, result = x.clamp(-1e4, 1e4), y.clamp(-1.0, 1.0)
    for impl in backends.impls:
        rows = zip(
            INEXACT.items(),
            Inexact()(x, y, impl=impl),
            Inexact()(grad, result, impl=impl),
            strict=True,
        )
        for (packet, (function, bound, negligible)), plain, moderate in rows:
            backward = packet in (aten.sigmoid_backward, aten.tanh_backward)
            actual, arguments = (moderate, (grad, result)) if backward else (plain, (x, y))
            truth = function(*(v.double() for v in arguments))
            if backward:
                # 1 - y cancels where y is near 1: the error is relative to the factors.
                scale = arguments[0].double().abs() * 2.0**-24 * 4
                finite = truth.isfinite()
                assert ((actual - truth).abs() <= scale + SMALLEST)[finite].all(), (impl, packet)
                assert actual.isnan()[~finite].all()
                continue
            error = errors(actual, truth, negligible)
            worst = error.argmax()
            assert error.max() <= bound, (
                f"{impl}: {packet} of {x.flatten()[worst]} errs by {error.max()} ulp"
            )


def test_exponential_over_its_range(backends):
    every = torch.arange(-(2**31), 2**31, 4999, dtype=torch.int64).to(torch.int32)
    limits = torch.linspace(-105.0, 90.0, 100_001)
    all_values = torch.cat([edges(), limits, every.view(torch.float32)])[None].to(backends.device)
    for impl in backends.impls:
        # Triton's interpreter is slow, and its exponential is NumPy's.
        interpreted = impl == "triton" and backends.device == "cpu"
        x = all_values[:, :: 499 if interpreted else 1]
        truth = torch.exp(x.double())
        exp = Inexact()(x, x, impl=impl)[0]
        assert errors(exp, truth).max() <= 2, impl
        assert exp[x > 88.73].isinf().all()
        assert (exp[x < -104] == 0).all()
        assert exp[(x < -88) & (x > -103)].gt(0).all()  # subnormal results are not flushed


EXPONENTS = (-66, -65, -64, -3, -2, -1, 0, 1, 2, 3, 7, 64, 65, 66, 101, 1000, 0.5, -0.5, 2.5, 1.7)


def test_powers(backends):
    neuron = Powers(*EXPONENTS)
    x = torch.cat([torch.linspace(-4.0, 4.0, 1601), edges()])[None].to(backends.device)
    for impl in backends.impls:
        square, *powers, exponential = neuron(x, impl=impl)
        assert same(square, x * x).all()
        for n, actual in zip(EXPONENTS, powers, strict=True):
            truth = x.double() ** n
            usable = (truth.abs() < 2.0**120) & (truth.abs() > 2.0**-120) & (x.abs() < 1e30)
            if float(n).is_integer() and abs(n) <= rewrites.MAX_EXPONENT:
                bound = torch.full_like(truth, float(abs(n)))
            else:
                # x ** 0.5 is a square root; the error of the others grows with the exponent of exp.
                bound = 3 + (2 if n % 1 else 3) * (n * x.double().abs().log()).abs()
                assert float(n).is_integer() or actual[x < 0].isnan().all(), (impl, n)
            assert (errors(actual[usable], truth[usable]) <= bound[usable]).all(), (impl, n)
            assert torch.equal(actual[x == 1], torch.ones_like(actual[x == 1]))
        near = x.abs() < 100
        bound = 3 + 2 * x.double()[near].abs()
        assert (errors(exponential[near], torch.exp2(x.double()[near])) <= bound).all(), impl


def test_integer_powers_are_repeated_multiplication(backends):
    x = pairs()[0].to(backends.device)
    neuron = Powers(2, 3, 4, -2)
    square = x * x
    expected = (square, square * x, square * square, 1 / square)
    for impl in backends.impls:
        for a, e in zip(neuron(x, impl=impl)[1:-1], expected, strict=True):
            assert same(a, e).all()


def test_a_bool_attribute_and_a_constant_output(backends):
    class Constants(Neuron):
        def __init__(self):
            super().__init__()
            self.flag, self.count = True, 3

        def step(self, x):
            return (x * self.flag, x + self.count, torch.ones_like(x), x > 2.0), ()

    x = torch.rand(2, 5, device=backends.device)
    for impl in backends.impls:
        scaled, moved, ones, never = Constants()(x, impl=impl)
        assert torch.equal(scaled, x)
        assert torch.equal(moved, x + 3)
        assert torch.equal(ones, torch.ones_like(x))
        assert torch.equal(never, torch.zeros_like(x))


@pytest.mark.parametrize(
    ("value", "numba", "triton"),
    [
        (0.1, "f32(0.1)", "0.1"),
        (2, "f32(2.0)", "2.0"),
        (True, "True", "True"),
        (math.inf, 'f32(float("inf"))', 'float("inf")'),
        (-math.inf, 'f32(float("-inf"))', 'float("-inf")'),
    ],
)
def test_literal(value, numba, triton):
    assert ops.text(value, "numba") == numba
    assert ops.text(value, "triton") == triton


class TensorPowers(Neuron):
    def step(self, x, y):
        return (x**y, (-1.5) ** y, 0.0**y), ()


def test_powers_with_tensor_exponents(backends):
    exponents = (-3.0, -2.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 7.0, math.inf, -math.inf, math.nan)
    bases = (0.0, 0.25, 1.0, 1.75, 6.0, math.inf, -0.25, -1.0, -2.0, -math.inf, math.nan)
    grid = torch.cartesian_prod(torch.tensor(bases), torch.tensor(exponents)).T[:, None]
    x, y = grid.to(backends.device)
    # (-1) ** inf is 1 in C.
    usual = ~((x == -1) & y.isinf())
    for impl in backends.impls:
        for actual, base in zip(TensorPowers()(x, y, impl=impl), (x, -1.5, 0.0), strict=True):
            expected = base**y
            torch.testing.assert_close(
                actual[usual], expected[usual], rtol=2e-6, atol=0, equal_nan=True
            )


class WholePowers(Neuron):
    def __init__(self, exponent):
        super().__init__()
        self.exponent = exponent

    def step(self, x):
        return x**self.exponent, ()


def test_great_whole_powers_of_special_values(backends):
    exponents = (65, 66, 100, 10**9 + 1, -65, -66)
    x = torch.tensor([[-1.0, 1.0, 0.0, -0.0, math.inf, -math.inf, math.nan, 2.0, -3.0]])
    for impl in backends.impls:
        for n, actual in zip(exponents, Powers(*exponents)(x, impl=impl)[1:-1], strict=True):
            expected = x**n
            special = (x.abs() <= 1) | ~expected.isfinite() | (expected == 0)
            assert same(actual, expected)[special].all(), (impl, n)
            assert torch.equal(actual.signbit(), expected.signbit()), (impl, n)


@pytest.mark.parametrize("exponent", [-2, -1, 0, 1, 2, 3])
def test_small_whole_powers_equal_the_loop(exponent, backends):
    """docs/conventions.md promises them bit for bit."""
    x = 2 * torch.randn(4, 3, 500, device=backends.device)
    neuron = WholePowers(exponent)
    expected = neuron(x, impl="reference")
    for impl in backends.impls:
        assert torch.equal(neuron(x, impl=impl), expected)
