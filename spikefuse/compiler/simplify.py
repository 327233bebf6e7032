"""Fewer operations for the same numbers: rewriting of traced graphs.

All rules are exact, up to the sign of zero, where operands and results are finite (`x - y >= 0`,
which becomes `x >= y`, is false for two infinities), but in two places. A hard reset,
`h * (1 - s) + v_reset * s`, becomes the choice `where(fired, v_reset, h)`, which resets an
infinite potential too, where the product would be NaN. And in gradients, which are exact to
rounding only, every product with a spike is a choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from spikefuse.compiler.graph import Graph, Node
from spikefuse.compiler.ops import TABLE, Operand

COMPARISONS = ("ge", "gt", "le", "lt", "eq", "ne")


def simplify(graph: Graph, gradients: bool = False) -> Graph:
    """The same outputs from fewer nodes; equal nodes become one.

    Args:
        gradients: the outputs are gradients.
    """
    builder = _Builder(graph.inputs, gradients)
    values: dict[str, Operand] = {name: name for name in graph.inputs}
    for node in graph.nodes:
        operands = [values[o] if isinstance(o, str) else o for o in node.operands]
        values[node.name] = builder.make(node.op, *operands)
    outputs = [values[o] if isinstance(o, str) else o for o in graph.outputs]
    return builder.graph.select(outputs)


def contracted(graph: Graph) -> Graph:
    """The graph of a reverse, in which products that are only added become multiply-adds, which
    round once; `x * (1 - y)` too. What decides who spikes stays as it is."""
    made = {node.name: node for node in graph.nodes}
    uses = Counter(o for node in graph.nodes for o in node.operands)
    uses.update(graph.outputs)
    decides = _deciding(graph)

    def alone(operand: Operand, op: str) -> tuple[Operand, ...]:
        """The operands of the node that made `operand`, if it is an `op` for this use only."""
        node = made.get(operand) if isinstance(operand, str) and uses[operand] == 1 else None
        return node.operands if node is not None and node.op == op else ()

    def shorter(node: Node) -> Node:
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

    nodes = [shorter(node) for node in graph.nodes]
    return Graph(graph.inputs, nodes, graph.outputs, graph.kinds).select(graph.outputs)


def _deciding(graph: Graph) -> set[str]:
    """The names of what conditions, and other values that jump, are computed from."""
    found = {name for name, kind in graph.kinds.items() if kind == "b"}
    for node in reversed(graph.nodes):
        if node.name in found or TABLE[node.op].jumps:
            found.update(o for o in node.operands if isinstance(o, str))
    return found


class _Builder:
    def __init__(self, inputs: tuple[str, ...], gradients: bool) -> None:
        self.graph, self.gradients = Graph(inputs), gradients
        self.known: dict[tuple[object, ...], Operand] = {}
        self.nodes: dict[Operand, Node] = {}

    def make(self, op: str, *operands: Operand) -> Operand:
        """The result of an operation, by a simpler one or an earlier one where there is one."""
        rule = RULES.get(op)
        simpler = rule(self, *operands) if rule else None
        if simpler is not None:
            return simpler
        # repr tells True from 1.0, and -0.0 from 0.0.
        key = (op, *map(repr, operands))
        if key not in self.known:
            result = self.graph.op(op, *operands)
            self.known[key] = result
            self.nodes[result] = self.graph.nodes[-1]
        return self.known[key]

    def match(self, operand: Operand, op: str) -> tuple[Operand, ...] | None:
        """The operands of the node that made `operand`, if it is an `op`."""
        node = self.nodes.get(operand) if isinstance(operand, str) else None
        return node.operands if node is not None and node.op == op else None


def _is(operand: Operand, value: float) -> bool:
    return not isinstance(operand, str | bool) and operand == value


Rule = Callable[..., Operand | None]


def _compare(name: str) -> Rule:
    def rule(b: _Builder, x: Operand, y: Operand) -> Operand | None:
        difference = b.match(x, "sub") if _is(y, 0.0) else None
        return b.make(name, *difference) if difference else None

    return rule


def _add(b: _Builder, x: Operand, y: Operand) -> Operand | None:
    for one, other in ((x, y), (y, x)):
        if _is(other, 0.0):
            return one
        negated = b.match(other, "neg")
        if negated:
            return b.make("sub", one, *negated)
    for one, other in ((x, y), (y, x)):
        kept, chosen = _gated(b, one), _gated(b, other)
        if kept and chosen and b.match(kept[0], "not") == (chosen[0],):
            return b.make("where", chosen[0], chosen[1], kept[1])
    return None


def _gated(b: _Builder, x: Operand) -> tuple[Operand, Operand] | None:
    """(condition, value) of a product of a value and a condition."""
    for product in (b.match(x, "mul") or (), (b.match(x, "mul") or ())[::-1]):
        gate = b.match(product[1], "float") if product else None
        if gate:
            return gate[0], product[0]
    choice = b.match(x, "where")
    if choice and _is(choice[2], 0.0):
        return choice[0], choice[1]
    if choice and _is(choice[1], 0.0):
        return b.make("not", choice[0]), choice[2]
    return None


def _sub(b: _Builder, x: Operand, y: Operand) -> Operand | None:
    if _is(y, 0.0):
        return x
    negated = b.match(y, "neg")
    if negated:
        return b.make("add", x, *negated)
    spike = b.match(y, "float") if _is(x, 1.0) else None
    return b.make("float", b.make("not", *spike)) if spike else None


def _mul(b: _Builder, x: Operand, y: Operand) -> Operand | None:
    for one, other in ((x, y), (y, x)):
        if _is(other, 1.0):
            return one
        spike = b.match(other, "float") if b.gradients else None
        if spike:
            return b.make("where", spike[0], one, 0.0)
    return None


def _neg(b: _Builder, x: Operand) -> Operand | None:
    inner = b.match(x, "neg")
    return inner[0] if inner else None


def _not(b: _Builder, x: Operand) -> Operand | None:
    inner = b.match(x, "not")
    return inner[0] if inner else None


def _where(b: _Builder, condition: Operand, x: Operand, y: Operand) -> Operand | None:
    if x == y and type(x) is type(y):
        return x
    inverse = b.match(condition, "not")
    return b.make("where", inverse[0], y, x) if inverse else None


RULES: dict[str, Rule] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "neg": _neg,
    "not": _not,
    "where": _where,
    **{name: _compare(name) for name in COMPARISONS},
}
