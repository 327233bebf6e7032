"""The pass that computes the scales of norms with running statistics together.

A scale is `weight / sqrt(variance + eps)`: three operations on one value per channel for each norm,
and conversions in half precision, which take longer than the block if the batch is small.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from spikefuse.block.functional import Norm
from spikefuse.graph import operations
from spikefuse.graph.nodes import changed_by, is_mode, storage_of, value

# Fewer norms need as many operations alone.
MIN_NORMS = 3


def compute_scales_together(graph: fx.Graph) -> None:
    """Let blocks read norms whose scales one operation computes."""
    if any(map(is_mode, graph.nodes)):
        return
    blocks = graph.find_nodes(op="call_function", target=operations.run_block)
    changed = {
        storage_of(x)
        for node in graph.nodes
        for x in (*operations.updated_statistics(node), *changed_by(node))
    }
    groups: dict[Any, dict[Norm, None]] = {}
    for block in blocks:
        for norm in block.args[2]:
            read: list[Any] = [norm.variance, norm.weight, norm.mean]
            read += [] if norm.bias is None else [norm.bias]
            if all(
                x is not None and x.op == "placeholder" and storage_of(x) not in changed
                for x in read
            ):
                x = value(norm.variance)
                groups.setdefault((norm.eps, x.device, x.dtype), {})[norm] = None
    known: dict[Norm, fx.Node] = {}
    for norms in groups.values():
        if len(norms) >= MIN_NORMS:
            with graph.inserting_before(blocks[0]):
                scaled = graph.call_function(operations.with_scales, ([*norms],))
                parts = [
                    graph.call_function(operator.getitem, (scaled, i)) for i in range(len(norms))
                ]
            known |= zip(norms, parts, strict=True)
    for block in blocks:
        block.update_arg(2, [known.get(norm, norm) for norm in block.args[2]])
