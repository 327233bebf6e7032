"""The pass for input that is the same at each step: layers before the first neuron compute one step.

A sequence is constant if its time has stride 0 (as from `encode.direct`), or if the network
expands or repeats an image along a new first dim. Layers that treat all rows alike compute one
step of it, and a neuron reads that step T times. Statistics of batch norms are those of all steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from spikefuse.graph.nodes import changes_something, name_of, repeats_first_dim, value
from spikefuse.nn.activations import FUNCTIONS, METHODS


def _always(node: fx.Node) -> bool:
    return True


def _can_normalize(node: fx.Node) -> bool:
    # One value per channel has no variance; T of them have.
    x = value(node.args[0])
    return bool(x.numel() > x.shape[1] * x.shape[0])


def _has_dims(count: int) -> Callable[[fx.Node], bool]:
    # With one dim less, dim 0 is the channels.
    return lambda node: value(node.args[0]).ndim == count


def _is_off(node: fx.Node) -> bool:
    training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
    return training is False


def _keeps_rows(node: fx.Node) -> bool:
    start = node.args[1] if len(node.args) > 1 else node.kwargs.get("start_dim", 0)
    return start % value(node.args[0]).ndim > 0


def _normalizes_rows(node: fx.Node) -> bool:
    shape = node.args[1] if len(node.args) > 1 else node.kwargs["normalized_shape"]
    return len(shape) < value(node.args[0]).ndim


#: Deterministic layers that compute each row along dim 0 of their first argument from that row
#: alone, all rows in the same way; and for which calls this is true.
ROWWISE: dict[Any, Callable[[fx.Node], bool]] = {
    F.linear: _always,
    **{conv: _has_dims(n + 3) for n, conv in enumerate((torch.conv1d, torch.conv2d, torch.conv3d))},
    F.batch_norm: _can_normalize,
    F.group_norm: _always,
    F.layer_norm: _normalizes_rows,
    **{pool: _has_dims(n + 3) for n, pool in enumerate((F.avg_pool1d, F.avg_pool2d, F.avg_pool3d))},
    **{pool: _has_dims(n + 3) for n, pool in enumerate((F.max_pool1d, F.max_pool2d, F.max_pool3d))},
    F.adaptive_avg_pool2d: _has_dims(4),
    torch.flatten: _keeps_rows,
    "flatten": _keeps_rows,
    F.dropout: _is_off,
    **dict.fromkeys((f for f in FUNCTIONS if f is not F.rrelu and f.__name__[-1] != "_"), _always),
    **dict.fromkeys((m for m in METHODS if m[-1] != "_"), _always),
}
_WORTH_IT = {F.linear, torch.conv1d, torch.conv2d, torch.conv3d}


@dataclass
class _Constant:
    """A value of which all steps are the same.

    Attributes:
        step: the node of one step, `[B, ...]`.
        num_steps: T.
        is_folded: whether the value is `[T * B, ...]` instead of `[T, B, ...]`.
    """

    step: fx.Node
    num_steps: Any
    is_folded: bool


def compute_steps_once(graph: fx.Graph) -> None:
    """Apply layers to one step of constant sequences."""
    constants: dict[fx.Node, _Constant] = {}
    nodes = list(graph.nodes)
    for node in nodes:
        if changes_something(node):  # perhaps a constant sequence
            break
        constant = _of_source(graph, node) or _of_reader(graph, node, constants)
        if constant is not None:
            constants[node] = constant
    if not any(node.target in _WORTH_IT for node in constants):
        _remove_unread(graph, [c.step for c in constants.values()])
        return
    for node in reversed(nodes):
        constant = constants.get(node)
        if constant is None or node.op == "placeholder":
            continue
        if any(user not in constants for user in node.users):
            with graph.inserting_after(node):
                repeated = _repeated(graph, node, constant)
            node.replace_all_uses_with(repeated, delete_user_cb=lambda n: n not in constants)
        if not node.users:
            graph.erase_node(node)
    _remove_unread(graph, [c.step for c in constants.values()])


def _of_source(graph: fx.Graph, node: fx.Node) -> _Constant | None:
    """The constant sequence `[T, B, ...]` that begins here, if one does."""
    x = value(node)
    if not isinstance(x, Tensor) or x.ndim < 3 or x.shape[0] == 1:
        return None
    if node.op == "placeholder":
        # Gradients of single steps need the whole sequence.
        if x.stride(0) != 0 or x.requires_grad:
            return None
        source = node
    elif name_of(node) in ("expand", "repeat"):
        source = node.args[0]
        image = value(source)
        if not isinstance(image, Tensor) or image.shape[1:] != x.shape[1:] or image.shape[0] != 1:
            return None
        if name_of(node) == "repeat" and not repeats_first_dim(node):
            return None
    else:
        return None
    first = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(first) if node is source else graph.inserting_after(node):
        step = graph.call_method("select", (source, 0, 0))
    step.meta["example_value"] = x[0]
    return _Constant(step, x.shape[0], is_folded=False)


def _of_reader(
    graph: fx.Graph, node: fx.Node, constants: dict[fx.Node, _Constant]
) -> _Constant | None:
    """What a layer makes of a constant sequence, if that is one, too."""
    x = node.args[0] if node.op.startswith("call") and node.args else None
    known = constants.get(x) if isinstance(x, fx.Node) else None
    if known is None or not isinstance(value(node), Tensor):
        return None
    if sum(n in constants for n in node.all_input_nodes) > 1:
        return None
    folded, steps = value(x), known.num_steps
    shape = value(node).shape
    if not known.is_folded:
        folds = name_of(node) in ("flatten", "reshape", "view") and (
            shape[1:] == folded.shape[2:] and shape[0] == folded.shape[0] * folded.shape[1]
        )
        return _Constant(known.step, steps, is_folded=True) if folds else None
    if name_of(node) in ("unflatten", "reshape", "view") and len(shape) == folded.ndim + 1:
        unfolds = shape[0] == steps and shape[2:] == folded.shape[1:]
        return _Constant(known.step, steps, is_folded=False) if unfolds else None
    applies = ROWWISE.get(node.target)
    if applies is None or not applies(node) or node.kwargs.get("inplace"):
        return None
    with graph.inserting_after(node):
        step = graph.node_copy(node, lambda n: known.step if n is x else n)
    step.meta["example_value"] = value(node).unflatten(0, (steps, -1))[0]
    if node.target is F.batch_norm:
        step.meta["repeats"] = steps * node.meta.get("repeats", 1)
    return _Constant(step, steps, is_folded=True)


def _repeated(graph: fx.Graph, node: fx.Node, constant: _Constant) -> fx.Node:
    """The values of all steps, in the shape of `node`."""
    shape = constant.num_steps, *[-1] * value(constant.step).ndim
    steps = graph.call_method("unsqueeze", (constant.step, 0))
    steps.meta["example_value"] = value(constant.step).unsqueeze(0)
    steps = graph.call_method("expand", (steps, *shape))
    steps.meta["example_value"] = value(steps.args[0]).expand(*shape)
    if constant.is_folded:
        steps = graph.call_method("flatten", (steps, 0, 1))
    steps.meta["example_value"] = value(node)
    return steps


def _remove_unread(graph: fx.Graph, steps: list[fx.Node]) -> None:
    for step in reversed(steps):
        if not step.users and step in graph.nodes:
            graph.erase_node(step)
