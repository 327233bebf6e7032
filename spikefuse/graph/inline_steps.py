"""The pass that lets Inductor compile short scans.

Inductor cannot look into the kernels of this library. The steps of a neuron, as they are defined,
are pointwise operations, which it compiles together with the norms, sums and poolings around them.
Scans of few steps that need no gradient, as in a `Stream`, are computed in this way.
"""

from __future__ import annotations

from torch import fx

from spikefuse.graph import operations
from spikefuse.graph.nodes import value
from spikefuse.graph.operations import ScanNode

# The time to compile grows with the steps, and the gain falls. Measured on two cores, networks of 1
# to 16 steps gain.
MAX_STEPS = 8


def inline_steps(graph: fx.Graph) -> None:
    """Let short scans on a CPU be computed by PyTorch's operations."""
    for node in graph.find_nodes(op="call_function", target=operations.scan):
        x = value(ScanNode(node).inputs[0])
        num_steps, results = x.shape[0], value(node)
        is_short = isinstance(num_steps, int) and num_steps <= MAX_STEPS
        if is_short and x.device.type == "cpu" and not any(y.requires_grad for y in results):
            node.target = operations.run_steps
