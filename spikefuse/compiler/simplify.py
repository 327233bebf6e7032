"""Rewrite traced graphs into fewer operations with the same results.

All rules are exact up to the sign of zero, with two exceptions for values that are not finite.
`x - y >= 0` becomes `x >= y`, which differs for two equal infinities. A hard reset,
`h * (1 - s) + v_reset * s`, becomes `where(fired, v_reset, h)`, which also resets an infinite
potential, where the product would be NaN.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from spikefuse.compiler.graph import Graph, Node
from spikefuse.compiler.ops import TABLE, Operand

COMPARISONS = ("ge", "gt", "le", "lt", "eq", "ne")


def simplify(graph: Graph) -> Graph:
    """Return a graph with the same outputs and fewer nodes; equal nodes are merged."""
    builder = _Builder(graph.inputs)
    values: dict[str, Operand] = {name: name for name in graph.inputs}
    for node in graph.nodes:
        operands = [values[o] if isinstance(o, str) else o for o in node.operands]
        values[node.name] = builder.make(node.op, *operands)
    outputs = [values[o] if isinstance(o, str) else o for o in graph.outputs]
    return builder.graph.select(outputs)


def contracted(graph: Graph) -> Graph:
    """Replace products that are only added, and `x * (1 - y)`, by fused multiply-adds.

    For the graphs of gradients. Nodes that conditions depend on are not changed.
    """
    made = {node.name: node for node in graph.nodes}
    uses = Counter(o for node in graph.nodes for o in node.operands)
    uses.update(graph.outputs)
    decides = _deciding(graph)

    def alone(operand: Operand, op: str) -> tuple[Operand, ...]:
        """Return the operands of the `op` that computes `operand`, if it has no other use."""
        node = made.get(operand) if isinstance(operand, str) and uses[operand] == 1 else None
        return node.operands if node is not None and node.op == op else ()

    def contract(node: Node) -> Node:
        if node.name in decides or node.op not in ("add", "sub", "mul"):
            return node
        x, y = node.operands
        if node.op == "sub":
            factors = alone(y, "mul")
            return replace(node, op="fnma", operands=(*factors, x)) if factors else node
        for one, other in ((x, y), (y, x)):
            if node.op == "add" and (factors := alone(other, "mul")):
                return replace(node, op="fma", operands=(*factors, one))
            if node.op == "mul" and isinstance(one, str):
                difference = alone(other, "sub")
                if difference and _is(difference[0], 1.0):
                    return replace(node, op="fnma", operands=(one, difference[1], one))
        return node

    nodes = [contract(node) for node in graph.nodes]
    return replace(graph, nodes=nodes).select(graph.outputs)


def _deciding(graph: Graph) -> set[str]:
    """Return the names that conditions and other discontinuous values are computed from."""
    found = {name for name, kind in graph.kinds.items() if kind == "b"}
    for node in reversed(graph.nodes):
        if node.name in found or TABLE[node.op].discontinuous:
            found.update(o for o in node.operands if isinstance(o, str))
    return found


class _Builder:
    def __init__(self, inputs: tuple[str, ...]) -> None:
        self.graph = Graph(inputs)
        self.known: dict[tuple[object, ...], Operand] = {}
        self.nodes: dict[Operand, Node] = {}

    def make(self, op: str, *operands: Operand) -> Operand:
        """Return the result of an operation, simplified or taken from an equal node if possible."""
        rule = RULES.get(op)
        simpler = rule(self, *operands) if rule else None
        if simpler is not None:
            return simpler
        # repr distinguishes True from 1.0, and -0.0 from 0.0.
        key = (op, *map(repr, operands))
        if key not in self.known:
            result = self.graph.op(op, *operands)
            self.known[key] = result
            self.nodes[result] = self.graph.nodes[-1]
        return self.known[key]

    def match(self, operand: Operand, op: str) -> tuple[Operand, ...]:
        """Return the operands of the node that computes `operand` if it is an `op`, else ()."""
        node = self.nodes.get(operand) if isinstance(operand, str) else None
        return node.operands if node is not None and node.op == op else ()


def _is(operand: Operand, value: float) -> bool:
    return not isinstance(operand, str | bool) and operand == value


Rule = Callable[..., Operand | None]


def _compare(name: str) -> Rule:
    def rule(b: _Builder, x: Operand, y: Operand) -> Operand | None:
        difference = b.match(x, "sub") if _is(y, 0.0) else ()
        return b.make(name, *difference) if difference else None

    return rule


def _add(b: _Builder, x: Operand, y: Operand) -> Operand | None:
    for one, other in ((x, y), (y, x)):
        if _is(other, 0.0):
            return one
        if negated := b.match(other, "neg"):
            return b.make("sub", one, *negated)
    for one, other in ((x, y), (y, x)):
        silent, fired = _gated(b, one), _gated(b, other)
        if silent and fired and b.match(silent[0], "not") == (fired[0],):
            return b.make("where", fired[0], fired[1], silent[1])
    return None


def _gated(b: _Builder, x: Operand) -> tuple[Operand, Operand] | None:
    """Return (condition, value) if `x` is the product of a value and a condition."""
    factors = b.match(x, "mul")
    for value, factor in (factors, factors[::-1]) if factors else ():
        if gate := b.match(factor, "float"):
            return gate[0], value
    choice = b.match(x, "where")
    if choice and _is(choice[2], 0.0):
        return choice[0], choice[1]
    if choice and _is(choice[1], 0.0):
        return b.make("not", choice[0]), choice[2]
    return None


def _sub(b: _Builder, x: Operand, y: Operand) -> Operand | None:
    if _is(y, 0.0):
        return x
    if negated := b.match(y, "neg"):
        return b.make("add", x, *negated)
    spike = b.match(y, "float") if _is(x, 1.0) else ()
    return b.make("float", b.make("not", *spike)) if spike else None


def _mul(b: _Builder, x: Operand, y: Operand) -> Operand | None:
    return y if _is(x, 1.0) else x if _is(y, 1.0) else None


def _involution(name: str) -> Rule:
    def rule(b: _Builder, x: Operand) -> Operand | None:
        inner = b.match(x, name)
        return inner[0] if inner else None

    return rule


def _where(b: _Builder, condition: Operand, x: Operand, y: Operand) -> Operand | None:
    if x == y and type(x) is type(y):
        return x
    inverse = b.match(condition, "not")
    return b.make("where", inverse[0], y, x) if inverse else None


RULES: dict[str, Rule] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "neg": _involution("neg"),
    "not": _involution("not"),
    "where": _where,
    **{name: _compare(name) for name in COMPARISONS},
}
