"""The pass that computes the scales of all norms with running statistics together.

A scale is `weight / sqrt(variance + eps)`: three operations on one value per channel for each norm,
which take longer than the block that reads it if the batch is small.
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
    """Let blocks read scales that one operation computes."""
    blocks = graph.find_nodes(op="call_function", target=operations.run_block)
    changed = {
        storage_of(x)
        for node in graph.nodes
        for x in (*operations.updated_statistics(node), *changed_by(node))
    }

    def is_known(norm: Norm) -> bool:
        read: list[Any] = [norm.variance, norm.weight]
        return all(
            x is not None and x.op == "placeholder" and storage_of(x) not in changed for x in read
        )

    def kind(norm: Norm) -> tuple[Any, ...]:
        x = value(norm.variance)
        return norm.eps, x.device, x.dtype

    norms = [norm for block in blocks for norm in block.args[2] if is_known(norm)]
    if len(norms) < MIN_NORMS or len({*map(kind, norms)}) > 1 or any(map(is_mode, graph.nodes)):
        return
    variances, weights = [n.variance for n in norms], [n.weight for n in norms]
    with graph.inserting_before(blocks[0]):
        arguments: Any = variances, weights, norms[0].eps
        scales = graph.call_function(operations.scales, arguments)
        parts = [graph.call_function(operator.getitem, (scales, i)) for i in range(len(norms))]
    unread = iter(parts)
    for block in blocks:
        read = [n._replace(scale=next(unread)) if is_known(n) else n for n in block.args[2]]
        block.update_arg(2, read)
