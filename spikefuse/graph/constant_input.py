"""The pass for input that is the same at each step, of which the first layers compute one step.

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

from spikefuse.graph.nodes import (
    arguments_of,
    call_method,
    changed_by,
    compute_value,
    is_mode,
    name_of,
    repeats_first_dim,
    storage_of,
    value,
)
from spikefuse.nn.activations import FUNCTIONS, METHODS


def _always(node: fx.Node) -> bool:
    return True


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
    shape: Any = node.args[1] if len(node.args) > 1 else node.kwargs["normalized_shape"]
    return len(shape) < value(node.args[0]).ndim


#: Deterministic layers that compute each row along dim 0 of their first argument from that row
#: alone, all rows in the same way; and for which calls this is true.
ROWWISE: dict[Any, Callable[[fx.Node], bool]] = {
    F.linear: _always,
    **{conv: _has_dims(n + 3) for n, conv in enumerate((torch.conv1d, torch.conv2d, torch.conv3d))},
    F.batch_norm: _always,
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
        num_steps: T.
        is_folded: whether the value is `[T * B, ...]` instead of `[T, B, ...]`.
        is_last: whether its readers need all steps.
    """

    num_steps: Any
    is_folded: bool
    is_last: bool = False


@dataclass
class _Step:
    """The node of one step `[B, ...]`, and the number of steps or the node that computes it."""

    node: fx.Node
    num_steps: Any


def compute_steps_once(graph: fx.Graph) -> None:
    """Apply layers to one step of constant sequences."""
    constants = _constants(graph)
    if not any(node.target in _WORTH_IT for node in constants):
        return
    steps: dict[fx.Node, _Step] = {}
    for node, constant in constants.items():
        source: Any = node.args[0] if node.args else None
        before = constants.get(source) if isinstance(source, fx.Node) else None
        if before is None:
            steps[node] = _first_step(graph, node)
        elif before.is_folded != constant.is_folded:
            steps[node] = steps[source]
        else:
            steps[node] = _computed_step(graph, node, steps[source])
    for node in reversed(constants):
        if node.op == "placeholder":
            continue
        if any(user not in constants for user in node.users):
            repeated = _repeated(graph, steps[node], constants[node])
            node.replace_all_uses_with(repeated, delete_user_cb=lambda n: n not in constants)
        if not node.users:
            graph.erase_node(node)


def _constants(graph: fx.Graph) -> dict[fx.Node, _Constant]:
    """The constant sequences, in the order of the graph."""
    constants: dict[fx.Node, _Constant] = {}
    ends = {storage_of(x) for node in graph.nodes for x in changed_by(node)}
    # The caller may change what is returned, and differentiate with respect to it.
    ends |= {storage_of(x) for x in graph.output_node().all_input_nodes}
    for node in graph.nodes:
        if is_mode(node):
            break
        constant = _of_source(node) or _of_reader(node, constants)
        if constant is not None:
            constant.is_last = storage_of(node) in ends
            constants[node] = constant
    return constants


def _of_source(node: fx.Node) -> _Constant | None:
    """The constant sequence `[T, B, ...]` that begins here, if one does."""
    x = value(node)
    if not isinstance(x, Tensor) or x.ndim < 3 or x.shape[0] == 1:
        return None
    if node.op == "placeholder":
        # Gradients of single steps need the whole sequence.
        is_source = x.stride(0) == 0 and not x.requires_grad
    else:
        image = value(node.args[0]) if len(node.args) > 1 else None
        is_source = isinstance(image, Tensor) and image.shape == (1, *x.shape[1:])
        is_source &= name_of(node) == "expand" or (
            name_of(node) == "repeat" and repeats_first_dim(node)
        )
    return _Constant(x.shape[0], is_folded=False) if is_source else None


def _of_reader(node: fx.Node, constants: dict[fx.Node, _Constant]) -> _Constant | None:
    """What a layer makes of a constant sequence, if that is one, too."""
    x = node.args[0] if node.op.startswith("call") and node.args else None
    known = constants.get(x) if isinstance(x, fx.Node) else None
    if known is None or known.is_last or not isinstance(value(node), Tensor):
        return None
    if sum(n in constants for n in node.all_input_nodes) > 1:
        return None
    before, after = value(x).shape, value(node).shape
    if not known.is_folded:
        folds = name_of(node) in ("flatten", "reshape", "view") and (
            after == (before[0] * before[1], *before[2:])
        )
        return _Constant(known.num_steps, is_folded=True) if folds else None
    if name_of(node) in ("unflatten", "reshape", "view"):
        unfolds = after[:1] == (known.num_steps,) and after[2:] == before[1:]
        return _Constant(known.num_steps, is_folded=False) if unfolds else None
    applies = ROWWISE.get(node.target)
    if applies is None or not applies(node) or node.kwargs.get("inplace"):
        return None
    has_one_value = node.target is F.batch_norm and (
        value(node).numel() <= after[1] * known.num_steps
    )
    if has_one_value and arguments_of(node, F.batch_norm)["training"]:
        return None  # it has no variance, but T of them have
    return _Constant(known.num_steps, is_folded=True)


def _first_step(graph: fx.Graph, source: fx.Node) -> _Step:
    image: Any
    if source.op == "placeholder":
        image, num_steps = source, value(source).shape[0]
        place = next(n for n in graph.nodes if n.op != "placeholder")
    else:
        image, num_steps = source.args[:2]
        if isinstance(num_steps, tuple | list):
            num_steps = num_steps[0]
        place = source
    with graph.inserting_before(place):
        if isinstance(num_steps, torch.SymInt):
            num_steps = call_method(graph, "size", source, 0)
        return _Step(call_method(graph, "select", image, 0, 0), num_steps)


def _computed_step(graph: fx.Graph, node: fx.Node, before: _Step) -> _Step:
    """Apply the layer `node` to one step."""
    with graph.inserting_before(node):
        step = graph.node_copy(node, lambda n: before.node if n is node.args[0] else n)
    if node.target is F.batch_norm:
        step.meta["repeats"] = before.num_steps
    compute_value(step)
    return _Step(step, before.num_steps)


def _repeated(graph: fx.Graph, step: _Step, constant: _Constant) -> fx.Node:
    """Repeat a step as often as its constant does."""
    with graph.inserting_before(step.node.next):
        y = call_method(graph, "unsqueeze", step.node, 0)
        shape = [-1] * value(step.node).ndim
        y = call_method(graph, "expand", y, step.num_steps, *shape)
        if constant.is_folded:
            y = call_method(graph, "flatten", y, 0, 1)
        if constant.is_last:  # in memory of its own
            y = call_method(graph, "clone", y, memory_format=torch.contiguous_format)
    return y
