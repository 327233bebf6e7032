"""Graphs that TorchDynamo captures of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx


def captured_graph(function: Callable[..., Any], *args: Any) -> fx.GraphModule:
    """The graph of a call."""
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        found.append(gm)
        return gm.forward

    torch.compiler.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*args)
    (gm,) = found
    return gm


def returned(gm: fx.GraphModule) -> Any:
    """The node that a graph returns first."""
    return gm.graph.output_node().args[0][0]


def targets(gm: fx.GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op.startswith("call")]
