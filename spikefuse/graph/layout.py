"""The pass that keeps feature maps in channels-last memory on a GPU.

cuDNN's fast convolutions in half precision are channels-last; for other inputs it converts them
and their results. Channels-last maps are also the tokens `[..., N, C]` of a transformer, so that a
pointwise convolution of them is a linear layer. Blocks, scans and poolings take any dense layout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from spikefuse.graph import operations
from spikefuse.graph.nodes import ADDITIONS, changes_something, is_view, name_of, value


def use_channels_last(graph: fx.Graph) -> None:
    """Let convolutions read and write channels-last memory, and drop conversions back."""
    nodes = list(graph.nodes)
    if any(changes_something(node) or name_of(node) == "as_strided" for node in nodes):
        return  # perhaps a tensor of which a conversion makes a copy
    convolutions = [n for n in nodes if n.target in _CONVOLUTIONS and _is_on_gpu(n)]
    for node in convolutions:
        if node.target is torch.conv2d:
            node.target = operations.conv2d
        elif _is_pointwise(node):
            node.target = operations.pointwise_conv1d
    if not convolutions:
        return
    for node in nodes:
        if node.target == "view" and not isinstance(node.args[1], torch.dtype):
            node.target = "reshape"  # which copies where other strides need it
    for node in nodes:
        if _merges_with_a_copy(node) and all(map(_takes_any_layout, _readers(node))):
            _merge_into_tokens(graph, node)
    for node in nodes:
        if _makes_contiguous(node) and all(map(_takes_any_layout, _readers(node))):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in nodes:
        _keep_layout_of_gradients(graph, node)


def _keep_layout_of_gradients(graph: fx.Graph, node: fx.Node) -> None:
    """Convert the gradients of other readers once, before they are added to those of layers."""
    if not (_takes_any_layout(node) and isinstance(value(node), Tensor) and value(node).ndim > 3):
        return
    others = [user for user in node.users if not all(map(_takes_any_layout, _readers_by(user)))]
    others = [user for user in others if user.op != "output"]
    if not others or (len(others) == len(node.users) == 1 and node.target not in ADDITIONS):
        return
    with graph.inserting_after(node):
        kept = graph.call_function(operations.keep_layout, (node,))
    kept.meta.update(node.meta)
    for user in others:
        user.replace_input_with(node, kept)


def _merges_with_a_copy(node: fx.Node) -> bool:
    """Whether a node copies `[..., h, d, N]`, the heads of an attention, into `[..., h * d, N]`."""
    if node.target not in ("reshape", torch.reshape):
        return False
    x, y = value(node.args[0]), value(node)
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):  # x is the result of a block
        return False
    merges = x.ndim == y.ndim + 1 and x.shape[:-3] == y.shape[:-2] and x.shape[-1] == y.shape[-1]
    if y.ndim < 3 or not merges:
        return False
    try:
        x.view(y.shape)
    except (RuntimeError, ValueError):
        return True
    return False


def _merge_into_tokens(graph: fx.Graph, node: fx.Node) -> None:
    """Let the copy be `[..., N, h * d]` in memory."""
    with graph.inserting_before(node):
        tokens = graph.call_method("movedim", (node.args[0], -1, -3))
        tokens = graph.call_method("flatten", (tokens, -2))
        result = graph.call_method("transpose", (tokens, -1, -2))
    result.meta.update(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


_CONVOLUTIONS = {torch.conv1d, torch.conv2d}


def _is_on_gpu(node: fx.Node) -> bool:
    x = value(node)
    return isinstance(x, Tensor) and x.is_cuda and not node.kwargs


def _is_pointwise(node: fx.Node) -> bool:
    """Whether a convolution computes each position from that position alone."""
    defaults: list[Any] = [None, 1, 0, 1, 1]
    weight, settings = value(node.args[1]), [*node.args[2:], *defaults[len(node.args) - 2 :]]
    _, stride, padding, _, groups = [s[0] if isinstance(s, tuple | list) else s for s in settings]
    return weight.shape[2] == 1 and value(node).ndim == 3 and (stride, padding, groups) == (1, 0, 1)


def _makes_contiguous(node: fx.Node) -> bool:
    return node.target == "contiguous" and len(node.args) == 1 and not node.kwargs


def _readers(node: fx.Node) -> list[fx.Node]:
    """What reads a tensor, directly or through views."""
    return [reader for user in node.users for reader in _readers_by(user)]


def _readers_by(user: fx.Node) -> list[fx.Node]:
    return _readers(user) if is_view(user) else [user]


def _takes_any_layout(node: fx.Node) -> bool:
    """Whether a node's values do not depend on the strides of what it reads."""
    return node.op != "output" and (
        node.target in _LAYERS or str(getattr(node.target, "__module__", "")) in _MODULES
    )


_LAYERS: set[Any] = {torch.conv1d, torch.conv2d, torch.nn.functional.linear, torch.matmul, "matmul"}
_MODULES = {"_operator", "spikefuse.graph.operations"}
