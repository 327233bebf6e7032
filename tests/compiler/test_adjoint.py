"""The reverse of a step against autograd, both in float64 and without kernels."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spikefuse as sf
from spikefuse.compiler.adjoint import reverse_step
from spikefuse.compiler.trace import Graph, step_function, trace_step

# The functions that the Numba text of the table calls, for Python floats.
LANGUAGE = {
    "f32": float,
    "exp": math.exp,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "log": math.log,
    "sqrt": math.sqrt,
    "fma": lambda a, b, c: a * b + c,
    "floor": math.floor,
    "round_even": round,
    "fmod": math.fmod,
    "log2": math.log2,
    "sin": math.sin,
    "cos": math.cos,
    "erf": math.erf,
}


def evaluate(graph: Graph, values: list[float]) -> list[float]:
    names = dict(zip(graph.inputs, values, strict=True))
    scope = {**LANGUAGE, **names}
    exec("\n".join(graph.lines("numba")), scope)
    return [float(eval(text, scope)) for text in graph.results("numba")]


def assert_reverse(neuron: sf.Neuron, values: list[float], tolerance: float = 1e-12) -> None:
    """Compare at one point; values: inputs, states, parameters, gradients of the results."""
    step = trace_step(neuron)
    reverse = reverse_step(neuron, step)
    fixed = len(step.inputs) + len(step.states)
    num_results = step.num_outputs + len(step.states)
    drawn = itertools.cycle(values)
    point = [next(drawn) for _ in range(fixed + len(step.params) + num_results)]
    leaves = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in point]
    for name, leaf in zip(step.params, leaves[fixed:], strict=False):
        leaf.requires_grad_(name in reverse.params)
    primal, incoming = leaves[: len(point) - num_results], leaves[len(point) - num_results :]
    results = step_function(neuron, step.params)(*primal)
    learnable = [primal[fixed + step.params.index(name)] for name in reverse.params]
    gradients = [g.detach() for r, g in zip(results, incoming, strict=True) if r.requires_grad]
    expected = torch.autograd.grad(
        [r for r in results if r.requires_grad],
        [*primal[:fixed], *learnable],
        gradients,
        allow_unused=True,
    )
    actual = evaluate(reverse.graph, point)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        wanted = 0.0 if e is None else e.item()
        assert a == pytest.approx(wanted, rel=tolerance, abs=tolerance), (point, actual, expected)


class Unary(sf.Neuron):
    """A function of the input; the gradient of the output is the second value drawn."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def step(self, x):
        return self.function(x), ()


class Binary(sf.Neuron):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def step(self, x, y):
        return self.function(x, y), ()


UNARY = {
    "neg": lambda x: -x,
    "abs": torch.abs,
    "floor": lambda x: x + torch.floor(x),
    "sign": lambda x: x * torch.sign(x - 0.25),
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "square": torch.square,
    "cube": lambda x: x**3,
    "great power": lambda x: (x - 1.0) ** 65 + (x - 2.0) ** 66,
    "inverse square": lambda x: x**-2 + torch.reciprocal(x),
    "clamp": lambda x: torch.clamp(x, -0.5, 1.0),
    "clamp_min": lambda x: torch.clamp_min(x, 0.5),
    "masked_fill": lambda x: x.masked_fill(x > 0.75, 3.0),
    "where": lambda x: torch.where(x > 0.25, x * x, 0.5 * x),
    "no gradient": lambda x: (x > 0.5).float() + x.detach(),
    "bool": lambda x: x * ((x > 0.1) & (x < 1.0)),
    "rounded": lambda x: x * torch.round(x) + torch.ceil(x) + torch.trunc(x) * x,
    "sin": lambda x: torch.sin(x) * torch.cos(x) + torch.tan(x),
    "erf": torch.erf,
    "log2": lambda x: torch.log2(torch.abs(x) + 0.5),
    "log1p": lambda x: torch.log1p(torch.abs(x)),
    "softplus": lambda x: F.softplus(x) + F.softplus(8.0 * x, 2.0, 5.0),
    "silu": F.silu,
    "gelu": F.gelu,
    "leaky_relu": F.leaky_relu,
    "relu6": lambda x: F.relu6(3.0 * x) + F.hardtanh(x, -0.5, 0.75) + F.threshold(x, 0.25, 3.0),
    "2 ** x": lambda x: 2.0**x,
}
# These are defined for positive numbers.
POSITIVE = {
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "power": lambda x: x**1.7,
    "inverse power": lambda x: x**-0.5,
}
BINARY = {
    "add": lambda x, y: x + 0.3 * y,
    "sub": lambda x, y: 0.5 - x - y,
    "mul": lambda x, y: x * y * x,
    "div": lambda x, y: x / y + 0.5 / x,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "clamp": lambda x, y: torch.clamp(x, min=y),
    "where": lambda x, y: torch.where(x > y, x, y * x),
    "detach": lambda x, y: x * y.detach() + (x * y).detach(),
    "fmod": lambda x, y: torch.fmod(x, y) * y,
    "remainder": lambda x, y: torch.remainder(x, y) * x,
    "rounded quotient": lambda x, y: x * torch.div(x, y, rounding_mode="floor"),
    "power": lambda x, y: torch.abs(x) ** y,
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "lerp": lambda x, y: torch.lerp(x, y, torch.abs(x) * 0.5) + torch.lerp(x, y, 0.25),
}
# Polynomials and exponentials of float32.
APPROXIMATE = {
    "expm1": lambda x: torch.expm1(0.25 * x) + torch.expm1(2.0 * x),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "elu": lambda x: F.elu(x, 0.75),
}


@pytest.mark.parametrize("name", UNARY)
def test_one_argument(name):
    for x in (-2.0, -0.5, 0.25, 0.5, 0.8, 1.0, 1.5):
        assert_reverse(Unary(UNARY[name]), [x, 0.7])


@pytest.mark.parametrize("name", APPROXIMATE)
def test_one_argument_approximately(name):
    for x in (-2.0, -0.5, 0.1, 1.5):
        assert_reverse(Unary(APPROXIMATE[name]), [x, 0.7], 1e-3)


@pytest.mark.parametrize("name", POSITIVE)
def test_one_positive_argument(name):
    for x in (0.125, 0.5, 1.0, 3.0):
        assert_reverse(Unary(POSITIVE[name]), [x, -0.7])


def test_tanh():
    # Near 0 a polynomial, accurate to float32.
    for x in (-3.0, -0.3, -0.2, 0.0, 0.1, 0.24, 0.26, 2.0):
        assert_reverse(Unary(torch.tanh), [x, 0.7], 1e-7)


@pytest.mark.parametrize("name", BINARY)
def test_two_arguments(name):
    for x, y in ((0.5, 0.25), (0.25, 0.5), (-1.5, 2.0), (0.75, 0.75)):
        assert_reverse(Binary(BINARY[name]), [x, y, 0.7])


@pytest.mark.parametrize("function", [torch.abs, torch.relu])
def test_kinks(function):
    assert_reverse(Unary(function), [0.0, 0.7])


class Shared(sf.Neuron):
    """Values used several times, learnable parameters, results that equal arguments."""

    v, w = sf.State(), sf.State()

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.decay = 0.75

    def step(self, x, v, w):
        h = self.decay * v + self.gain * x * x
        return (h, x, self.gain), (h * self.gain - w, v)


@pytest.mark.parametrize("reset", ["hard", "soft"])
@pytest.mark.parametrize("detach_reset", [False, True])
@pytest.mark.parametrize(
    "surrogate",
    [
        sf.surrogate.Sigmoid(),
        sf.surrogate.Arctan(),
        sf.surrogate.FastSigmoid(),
        sf.surrogate.Rectangle(-0.5, 0.7),
        sf.surrogate.Triangle(1.5, 0.5),
        sf.surrogate.PiecewiseQuadratic(0.75),
        sf.surrogate.Gaussian(0.5),
        sf.surrogate.Erf(0.7, cutoff=-0.2),
        sf.surrogate.StraightThrough(),
        sf.surrogate.MultiGaussian(0.5),
    ],
    ids=lambda s: type(s).__name__,
)
def test_models(reset, detach_reset, surrogate):
    options = {"reset": reset, "detach_reset": detach_reset, "surrogate": surrogate}
    for neuron in (sf.LIF(0.5, 0.6, v_reset=-0.1, **options), sf.ALIF(0.7, 0.9, **options)):
        for shift in (0.0, 0.4, 1.3):
            values = [0.5 + shift, -0.3, 0.8, 0.2, 0.9, 1.1, -0.4, 0.35, 0.6, 0.15, 0.75]
            assert_reverse(neuron, values)


def test_shared_values_and_parameters():
    assert_reverse(Shared(), [0.5, -0.3, 0.8, 0.2, 0.9, 1.1, -0.4])


def test_which_values_of_a_surrogate_have_a_gradient():
    def found(surrogate):
        neuron = sf.LIF(surrogate=surrogate)
        return set(reverse_step(neuron, trace_step(neuron)).params) - OWN

    class Bell(sf.surrogate.Surrogate):
        def __init__(self):
            super().__init__(cutoff=-1.0)
            self.gain = 2.0

        def derivative(self, u):
            return torch.exp(-self.gain * u * u)

    class Nested(sf.surrogate.Surrogate):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def derivative(self, u):
            return self.inner.derivative(u)

    class NestedPrimal(Nested):
        def primal(self, u):
            return self.inner.primal(u)

    assert found(sf.surrogate.Triangle(cutoff=-0.5)) == {"surrogate.width", "surrogate.height"}
    assert found(sf.surrogate.Gaussian()) == {"surrogate.width"}
    assert found(Bell()) == found(Nested(sf.surrogate.Sigmoid())) == set()
    assert found(NestedPrimal(sf.surrogate.Sigmoid())) == {"surrogate.inner.width"}


OWN = {"decay", "threshold", "v_reset"}


def test_no_cutoff_adds_no_operation():
    def operations(cutoff, params):
        neuron = sf.IF(surrogate=sf.surrogate.Triangle(cutoff=cutoff))
        step = trace_step(neuron)
        chosen = reverse_step(neuron, step).select(step, step.inputs, params)
        return [node.op for node in chosen.graph.nodes]

    without, with_cutoff = operations(None, ()), operations(-0.5, ())
    assert sorted(with_cutoff) == sorted([*without, "lt", "where"])


def test_a_fixed_width_adds_no_operation():
    class Fixed(sf.surrogate.Triangle):
        def learns(self, name):
            return False

    def operations(surrogate, params=()):
        neuron = sf.IF(surrogate=surrogate)
        step = trace_step(neuron)
        chosen = reverse_step(neuron, step).select(step, step.inputs, params)
        return [node.op for node in chosen.graph.nodes]

    expected = operations(Fixed())
    assert sorted(operations(sf.surrogate.Triangle())) == sorted(expected)
    assert len(operations(sf.surrogate.Triangle(), ["surrogate.width"])) > len(expected)


def test_only_wanted_gradients_are_computed():
    neuron = sf.LIF()
    step = trace_step(neuron)
    reverse = reverse_step(neuron, step)
    graphs = {
        names: reverse.select(step, step.inputs, names).graph for names in ((), ("threshold",))
    }
    sizes = {names: len(graph.nodes) for names, graph in graphs.items()}
    assert [len(graph.outputs) for graph in graphs.values()] == [2, 3]
    assert sizes[()] < len(reverse.graph.nodes)
    point = [0.5 + 0.1 * i for i in range(len(graphs[()].inputs))]
    everything = evaluate(reverse.graph, point)
    # Products may be fused into sums, which round once.
    assert evaluate(graphs[()], point) == pytest.approx(everything[:2], rel=1e-14)
    index = 2 + reverse.params.index("threshold")
    before = 0.25  # the sum over earlier steps
    wanted = [*everything[:2], before + everything[index]]
    assert evaluate(graphs[("threshold",)], [*point, before]) == pytest.approx(wanted, rel=1e-14)
    only_state = reverse.select(step, (), ()).graph
    assert evaluate(only_state, point) == pytest.approx(everything[1:2], rel=1e-14)
