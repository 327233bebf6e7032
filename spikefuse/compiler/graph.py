"""Graphs of scalar operations, the representation between tracing and source text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from spikefuse.compiler import ops
from spikefuse.compiler.ops import Operand


@dataclass(frozen=True)
class Node:
    """`name = op(operands)`."""

    name: str
    op: str
    operands: tuple[Operand, ...]


@dataclass
class Graph:
    """Scalar operations in order; operands and outputs are names or constants."""

    inputs: tuple[str, ...]
    nodes: list[Node] = field(default_factory=list)
    outputs: tuple[Operand, ...] = ()
    kinds: dict[str, str] = field(default_factory=dict)

    def kind(self, operand: Operand) -> str:
        if isinstance(operand, str):
            return self.kinds.get(operand, "f")
        return "b" if isinstance(operand, bool) else "f"

    def op(self, name: str, *operands: Operand) -> Operand:
        """Append an operation, converting operands between bool and float where needed."""
        row = ops.TABLE[name]
        converted = tuple(
            self.convert(wanted, operand)
            for wanted, operand in zip(row.operands, operands, strict=True)
        )
        result = f"n{len(self.nodes)}"
        self.nodes.append(Node(result, name, converted))
        self.kinds[result] = row.result
        return result

    def convert(self, wanted: str, operand: Operand) -> Operand:
        """Return the operand as "f"(loat) or "b"(ool)."""
        if not isinstance(operand, str):
            return bool(operand) if wanted == "b" else float(operand)
        if self.kind(operand) == wanted:
            return operand
        return self.op("float" if wanted == "f" else "bool", operand)

    def select(self, outputs: Sequence[Operand]) -> Graph:
        """Return the part of the graph that `outputs` depend on."""
        needed = {o for o in outputs if isinstance(o, str)}
        nodes = []
        for node in reversed(self.nodes):
            if node.name in needed:
                nodes.append(node)
                needed.update(o for o in node.operands if isinstance(o, str))
        return Graph(self.inputs, nodes[::-1], tuple(outputs), self.kinds)

    def accumulate(self, outputs: Sequence[Operand], sums: Sequence[str]) -> Graph:
        """Return `select(outputs)` with the last outputs added to the inputs `sums`."""
        split = len(outputs) - len(sums)
        terms = zip(sums, outputs[split:], strict=True)
        totals = [Node(f"{name}_next", "add", (name, term)) for name, term in terms]
        graph = Graph(self.inputs, [*self.nodes, *totals], (), self.kinds)
        return graph.select([*outputs[:split], *(node.name for node in totals)])

    def without(self, absent: Collection[str]) -> Graph:
        """Return a graph of gradients without the terms of gradients that are absent.

        The graph is linear in them. Zeros in their place would give NaN where a factor is infinite.
        """
        gone: set[Operand] = set(absent)
        values: dict[Operand, Operand] = {}
        nodes: list[Node] = []
        for node in self.nodes:
            missing = [o in gone for o in node.operands]
            operands = tuple([values.get(o, o) for o in node.operands])
            if not any(missing):
                nodes.append(replace(node, operands=operands))
            elif node.op in ("add", "sub") and not all(missing):
                other = operands[missing.index(False)]
                if node.op == "sub" and missing[0]:
                    nodes.append(Node(node.name, "neg", (other,)))
                else:
                    values[node.name] = other
            elif node.op == "where" and not missing[0]:
                branches = [0.0 if out else o for o, out in zip(operands, missing, strict=True)]
                if branches[1:] == [0.0, 0.0]:
                    gone.add(node.name)
                else:
                    nodes.append(replace(node, operands=tuple(branches)))
            else:
                gone.add(node.name)
        outputs = [0.0 if o in gone else values.get(o, o) for o in self.outputs]
        return Graph(self.inputs, nodes, tuple(outputs), self.kinds)

    def is_binary(self, operand: Operand) -> bool:
        """Return whether an operand is 0 or 1 for all inputs."""
        if not isinstance(operand, str):
            return operand in (0.0, 1.0)
        node = next((node for node in self.nodes if node.name == operand), None)
        if node is None or node.op not in ("float", "where"):
            return False
        return node.op == "float" or all(map(self.is_binary, node.operands[1:]))

    def used(self) -> set[str]:
        """Return the names that the nodes and outputs read."""
        names = {o for node in self.nodes for o in node.operands if isinstance(o, str)}
        return names | {o for o in self.outputs if isinstance(o, str)}

    def lines(self, language: str) -> list[str]:
        """Return one assignment per node, in "triton" or "numba"."""
        lines = []
        for node in self.nodes:
            operands = [ops.text(operand, language) for operand in node.operands]
            lines.append(f"{node.name} = {getattr(ops.TABLE[node.op], language).format(*operands)}")
        return lines

    def results(self, language: str) -> list[str]:
        """Return the outputs as source text."""
        return [ops.text(output, language) for output in self.outputs]
