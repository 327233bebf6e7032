"""Simplified graphs compute the same results with fewer nodes."""

import itertools

import pytest
import torch

import spikefuse as sf
from spikefuse.compiler.adjoint import reverse_step
from spikefuse.compiler.graph import Graph
from spikefuse.compiler.simplify import contracted, simplify
from spikefuse.compiler.trace import trace_step

VALUES = (-1.5, -1.0, 0.0, 0.25, 1.0, 2.0)
FLOATS = ("a", "b")


def simplified(build):
    """Return the operations left in the simplified graph of `build(graph, a, b)`, and the graph."""
    graph = Graph(FLOATS)
    graph.outputs = (graph.convert("f", build(graph, *FLOATS)),)
    simple = simplify(graph)
    for point in itertools.product(VALUES, repeat=2):
        assert evaluate(simple, point) == evaluate(graph, point), point
    return [node.op for node in simple.nodes], simple


def evaluate(graph, point):
    """Evaluate a graph with one output in Python."""
    values = dict(zip(graph.inputs, point, strict=True))
    functions = {
        "add": lambda x, y: x + y,
        "sub": lambda x, y: x - y,
        "mul": lambda x, y: x * y,
        "neg": lambda x: -x,
        "ge": lambda x, y: x >= y,
        "lt": lambda x, y: x < y,
        "not": lambda x: not x,
        "float": float,
        "where": lambda c, x, y: x if c else y,
    }

    def get(operand):
        return values[operand] if isinstance(operand, str) else operand

    for node in graph.nodes:
        values[node.name] = functions[node.op](*map(get, node.operands))
    return get(graph.outputs[0])


def spike(g, h, threshold):
    return g.op("float", g.op("ge", g.op("sub", h, threshold), 0.0))


def test_a_hard_reset_becomes_a_where():
    def reset(g, h, threshold):
        s = spike(g, h, threshold)
        return g.op("add", g.op("mul", h, g.op("sub", 1.0, s)), g.op("mul", 0.25, s))

    operations, graph = simplified(reset)
    assert operations == ["ge", "where"]
    assert graph.nodes[-1].operands[1:] == (0.25, "a")


def test_a_soft_reset_subtracts_a_product():
    def reset(g, h, threshold):
        return g.op("sub", h, g.op("mul", threshold, spike(g, h, threshold)))

    # A where would hide that an infinite threshold times 0 is NaN.
    assert simplified(reset)[0] == ["ge", "float", "mul", "sub"]


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda g, a, b: g.op("add", g.op("mul", a, 1.0), 0.0), []),
        (lambda g, a, b: g.op("sub", a, 0.0), []),
        (lambda g, a, b: g.op("neg", g.op("neg", a)), []),
        (lambda g, a, b: g.op("add", a, g.op("neg", b)), ["sub"]),
        (lambda g, a, b: g.op("sub", a, g.op("neg", b)), ["add"]),
        (lambda g, a, b: g.op("not", g.op("not", g.op("lt", a, b))), ["lt", "float"]),
        (lambda g, a, b: g.op("where", g.op("not", g.op("lt", a, b)), a, 2.0), ["lt", "where"]),
        (lambda g, a, b: g.op("where", g.op("lt", a, b), b, b), []),
        (lambda g, a, b: g.op("mul", g.op("add", a, b), g.op("add", a, b)), ["add", "mul"]),
    ],
)
def test_rules(build, expected):
    assert simplified(build)[0] == expected


def test_constants_differ_by_type_and_sign():
    def build(g, a, b):
        same = g.op("where", g.op("lt", a, b), 1.0, 0.0)
        other = g.op("where", g.op("lt", a, b), 1.0, -0.0)
        return g.op("add", same, other)

    assert simplified(build)[0].count("where") == 2


def test_a_lif_neuron_takes_five_operations():
    step = trace_step(sf.LIF())
    assert [node.op for node in step.graph.nodes] == ["mul", "add", "ge", "float", "where"]


def test_infinite_potentials_are_reset():
    x = torch.full((2, 1, 1), float("inf"))
    assert sf.LIF(v_reset=0.0)(x).tolist() == [[[1.0]], [[1.0]]]


def test_different_conditions_are_not_merged():
    def build(g, a, b):
        first = g.op("mul", a, g.op("float", g.op("lt", a, b)))
        return g.op("add", first, g.op("mul", b, g.op("float", g.op("lt", b, a))))

    assert "where" not in simplified(build)[0]


def test_only_gradients_are_contracted():
    definition = sf.LIF(0.5, detach_reset=True)
    step = trace_step(definition)
    reverse = reverse_step(definition, step).select(step, ["x"], [])
    assert {"fma", "fnma"}.isdisjoint(node.op for node in step.graph.nodes)
    assert any(node.op in ("fma", "fnma") for node in reverse.graph.nodes)
    # The potential compared with the threshold equals the step's bit for bit.
    nodes = {node.name: node for node in reverse.graph.nodes}
    deciding = [node for node in nodes.values() if reverse.graph.kind(node.name) == "b"]
    assert deciding
    while deciding:
        node = deciding.pop()
        assert node.op not in ("fma", "fnma")
        deciding += [nodes[o] for o in node.operands if o in nodes]


def test_operands_of_floor_are_not_contracted():
    graph = Graph(("decay", "v", "x"))
    h = graph.op("add", graph.op("mul", "decay", "v"), "x")
    graph.outputs = (graph.op("floor", h),)
    assert [node.op for node in contracted(graph).nodes] == ["mul", "add", "floor"]


def test_one_minus_a_factor_is_contracted():
    """`x * (1 - y)`, as in the derivative of a sigmoid."""
    graph = Graph(("x", "y"))
    product = graph.op("mul", "x", graph.op("sub", 1.0, "y"))
    graph.outputs = (product,)
    (node,) = contracted(graph).nodes
    assert (node.op, node.operands) == ("fnma", ("x", "y", "x"))
