"""The backend "spikefuse" of torch.compile: passes over the graph that TorchDynamo captures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx

from spikefuse._torch import inductor
from spikefuse.graph import operations
from spikefuse.graph.checkpoint import CHECKPOINT, checkpointed, recompute_checkpoints
from spikefuse.graph.constant_input import compute_steps_once
from spikefuse.graph.fuse_norms import fuse_norms
from spikefuse.graph.inline_steps import inline_steps
from spikefuse.graph.layout import use_channels_last
from spikefuse.graph.nodes import mark_synchronized, synchronized, write_known_size
from spikefuse.graph.operations import ScanNode
from spikefuse.graph.recorded import buffers_of, recorded
from spikefuse.graph.report import GraphReport
from spikefuse.graph.save_bits import save_bits
from spikefuse.nn.call import current_policy

Graph = Callable[..., Any]


def spikefuse(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: dict[str, Any] | None = None
) -> Graph:
    """Compile a captured graph; `torch.compile(net, backend="spikefuse")` calls this.

    Args:
        options: see `compile_graph`.
    """
    return compile_graph(gm, example_inputs, GraphReport(), **(options or {}))


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    report: GraphReport,
    mode: str = "auto",
    chunks: int | None = None,
) -> Graph:
    """Fuse a graph, and return a function that runs it.

    Args:
        report: is told what was fused.
        mode: "eager" executes the graph, "recorded" replays it as CUDA graphs, "inductor" compiles
            it further, and "auto" is "recorded" on a GPU and "eager" on a CPU.
        chunks: cut the graph into about so many segments, which backward recomputes; it is executed
            then.
    """
    graphs = [part.graph for part in gm.modules() if isinstance(part, fx.GraphModule)]
    alone = not (any([*map(mark_synchronized, graphs)]) or operations.shares_time())
    if mode == "inductor" and chunks is None and alone:
        report.graphs += 1
        apply_passes(gm, report)
        inline_steps(gm.graph)
        gm.recompile()
        rewrite = save_bits if current_policy().packs_spikes else None
        return noted(inductor(gm, example_inputs, rewrite), report)
    run = operations.saving_bits(executable(gm, report, chunks))
    on_gpu = any(isinstance(x, Tensor) and x.is_cuda for x in example_inputs)
    records = mode == "recorded" or (mode == "auto" and on_gpu)
    if records and chunks is None and alone:
        run = recorded(run, buffers_of(gm))
    return noted(run, report)


def noted(run: Graph, report: GraphReport) -> Graph:
    """Let `report` know when a graph runs."""

    def run_noted(*args: Any) -> Any:
        report.has_run = True
        return run(*args)

    return run_noted


def executable(gm: fx.GraphModule, report: GraphReport, chunks: int | None) -> fx.GraphModule:
    """Fuse a graph, and let backward recompute segments of it; see `compile_graph`."""
    report.graphs += 1
    apply_passes(gm, report)
    recompute_checkpoints(gm)
    if chunks is not None:  # between whose segments only tensors and numbers may be alive
        return checkpointed(gm, chunks)
    gm.recompile()
    return gm


def apply_passes(gm: fx.GraphModule, report: GraphReport) -> None:
    """Fuse what can be fused; all else stays as it is."""
    graph = gm.graph
    for node in graph.find_nodes(op="call_function", target=CHECKPOINT):
        apply_passes(getattr(gm, node.args[0].target), report)
    for node in graph.nodes:
        write_known_size(node)
    for node in reversed(graph.nodes):
        if node.op.startswith("call") and node.target in (getattr, "size") and not node.users:
            graph.erase_node(node)  # reads of a tensor's attributes, which Dynamo has guarded
    compute_steps_once(graph)
    fuse_norms(graph, report)
    for node in graph.nodes:
        _call_directly(node)
    use_channels_last(graph)
    graph.lint()
    gm.recompile()


def _call_directly(node: fx.Node) -> None:
    """Call our function in place of one of PyTorch that computes the same."""
    if ScanNode.is_scan(node):
        node.target = operations.scan
    elif node.target is F.max_pool2d:
        node.target = operations.max_pool2d
    elif node.target is F.avg_pool2d:
        node.target = operations.avg_pool2d
    elif node.target is F.batch_norm and (
        node.meta.get("repeats") or synchronized(node) or operations.shares_time()
    ):
        node.target = operations.batch_norm
        repeats = node.meta.get("repeats", 1)
        node.kwargs = {**node.kwargs, "repeats": repeats, **synchronized(node)}
    elif node.target is operations.FUNCTION:
        node.target = operations.apply_function
