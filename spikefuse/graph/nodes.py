"""Read the graphs that TorchDynamo captures: values, views, and what changes a tensor or a mode."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef

from spikefuse.block.batch_norm import synchronized_batch_norm

_VIEW_NAMES = (
    *("view", "reshape", "flatten", "unflatten", "transpose", "permute", "movedim", "contiguous"),
    *("unsqueeze", "squeeze", "expand", "repeat"),
)
#: Calls whose result has the values of their first argument in other places, or repeats them.
VIEWS = {*_VIEW_NAMES, *(getattr(torch, n) for n in _VIEW_NAMES if hasattr(torch, n))}
#: Views that keep the order of the values, so that `reshape` undoes them.
RESHAPES = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"}

#: Additions, and those in place.
IN_PLACE_ADDITIONS = {operator.iadd, "add_"}
ADDITIONS = {operator.add, torch.add, "add", "__add__", *IN_PLACE_ADDITIONS}
PRODUCTS = {operator.mul, torch.mul, "mul", "__mul__"}


_IN_PLACE_OPERATORS = {
    operator.setitem,
    *(getattr(operator, f"i{name}") for name in ("add", "sub", "mul", "truediv", "floordiv")),
    *(getattr(operator, f"i{name}") for name in ("mod", "pow", "matmul", "and", "or", "xor")),
    *(getattr(operator, f"i{name}") for name in ("lshift", "rshift", "concat")),
}
_IN_PLACE_METHODS = {f"__{function.__name__}__" for function in _IN_PLACE_OPERATORS}
# Layers of torch that change a parameter or a buffer if this argument is given.
_UPDATING: dict[Any, str] = {
    F.instance_norm: "running_mean",
    F.embedding: "max_norm",
    F.embedding_bag: "max_norm",
}
_CUSTOM_OPS = type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor)
# Functions of torch that enter and leave modes, by which Dynamo records context managers.
_MODES = re.compile("_(set_grad_enabled|(enter|exit)_(autocast|inference_mode))")


def value(node: Any) -> Any:
    """The fake tensor, or other value, that a node has; None for what is not a node."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def storage_of(node: Any) -> int | None:
    """The identity of the memory of a tensor, which views share; None for other values."""
    x = value(node)
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        return None
    return StorageWeakRef(x.untyped_storage()).cdata


def name_of(node: fx.Node) -> str:
    """The name of the function or method that a node calls."""
    target = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def is_view(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op.startswith("call") and node.target in VIEWS


def has_one_reader(node: Any) -> bool:
    return isinstance(node, fx.Node) and len(node.users) == 1


def _module(node: fx.Node) -> tuple[str, str]:
    """The id of the module to whose code a node belongs, and the expression by which TorchDynamo
    found it; both empty if there is none."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return "", ""
    key, (path, _) = [*stack.items()][-1]
    return key.partition("@")[0], path


def have_one_module(a: fx.Node, b: fx.Node) -> bool:
    return _module(a) == _module(b)


def module_of(node: fx.Node, net: nn.Module | None) -> str:
    """The qualified name in `net`, if it is known, of the module to whose code a node belongs; ""
    for the whole network."""
    key, path = _module(node)
    if net is not None:
        for name, module in net.named_modules():
            if str(id(module)) == key:
                return name
    return re.sub(r"^L\[[^\]]*\]\.?", "", path)


def mark_synchronized(graph: fx.Graph) -> bool:
    """Mark the norms whose statistics other processes share, see `synchronized`, and return whether
    there are any."""
    nodes = graph.find_nodes(op="call_function", target=synchronized_batch_norm)
    for node in nodes:
        node.target, arguments = F.batch_norm, dict(node.kwargs)
        node.meta["synchronized"] = arguments.pop("norm")
        node.kwargs = arguments
    return bool(nodes)


def synchronized(norm: fx.Node) -> dict[str, Any]:
    """The further argument of operations on a norm whose statistics other processes share."""
    known = norm.meta.get("synchronized")
    return {} if known is None else {"synchronized": known}


def arguments_of(node: fx.Node, function: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of a call by name, with defaults, by the signature of `function`."""
    bound = inspect.signature(function).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _is_counter(node: Any) -> bool:
    """Whether a tensor may be the number of batches of a norm, which nothing else reads."""
    return node.op == "placeholder" and bool(value(node).dtype == torch.int64)


def changes_something(node: fx.Node) -> bool:
    """Whether a node may change a tensor in place that another one reads, or a mode."""
    if not node.op.startswith("call"):
        return False
    target, name = node.target, name_of(node)
    if target in _IN_PLACE_OPERATORS or name in _IN_PLACE_METHODS or _MODES.fullmatch(name):
        return True
    if is_operator(node):  # `not_` ends like a change in place
        return False
    if target == "add_" and _is_counter(node.args[0]):
        return False
    if target in _UPDATING:
        function: Any = target
        return arguments_of(node, function)[_UPDATING[function]] is not None
    if isinstance(target, _CUSTOM_OPS):
        return not str(target).startswith("spikefuse.")
    if "out" in node.kwargs or node.kwargs.get("inplace"):
        return True
    if inspect.isfunction(target) and any(x is True for x in node.args):
        return "inplace" in inspect.signature(target).parameters
    return name.endswith("_") and not name.endswith("__")


def changed_by(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node may change in place, except for running statistics of norms."""
    changed: Any = ()
    if node.op.startswith("call") and "out" in node.kwargs:
        changed = node.kwargs["out"]
    elif (changes_something(node) and not is_mode(node)) or node.target == "add_":
        is_known = node.args and not isinstance(node.target, _CUSTOM_OPS)
        is_known = is_known and node.target not in _UPDATING
        changed = node.args[0] if is_known else node.all_input_nodes
    nodes: list[fx.Node] = []
    fx.node.map_arg(changed, nodes.append)
    return nodes


def is_operator(node: fx.Node) -> bool:
    """Whether a node calls a function of Python's `operator`."""
    return getattr(node.target, "__module__", "") == operator.add.__module__


def write_known_size(node: fx.Node) -> None:
    """Write an integer that TorchDynamo computes from sizes as a number where it has guarded on its
    value, so that the size counts as no reader of a tensor."""
    from torch.fx.experimental.symbolic_shapes import is_concrete_int  # which imports SymPy

    number = value(node)
    if is_operator(node) and type(number) in (int, torch.SymInt) and is_concrete_int(number):
        for user in [*node.users]:
            args = user.args, user.kwargs
            user.args, user.kwargs = fx.node.map_arg(
                args, lambda n: int(number) if n is node else n
            )
        node.graph.erase_node(node)


def is_mode(node: fx.Node) -> bool:
    """Whether a node enters or leaves a mode, such as autocast."""
    return node.op == "call_function" and bool(_MODES.fullmatch(name_of(node)))


def views_above(node: Any) -> tuple[Any, list[fx.Node]]:
    """The first node above a chain of views with one reader each, and the views, last first."""
    views = []
    while is_view(node) and has_one_reader(node):
        views.append(node)
        node = node.args[0]
    return node, views


def dim_after(views: list[fx.Node], x: Tensor, dim: int) -> int | None:
    """Where a dim of a contiguous tensor like `x` is after `views`, last first; None if it is not a
    dim of its own, or the views copy.

    The views are replayed on a tensor without values, whose strides show the dim, so that no rule
    for any view is needed.
    """
    base = y = torch.empty_like(x, memory_format=torch.contiguous_format)
    for view in reversed(views):
        name, args = name_of(view), fx.node.map_arg(view.args[1:], value)
        if name == "contiguous":
            continue
        if name == "repeat":
            if not repeats_first_dim(view):
                return None
            name, args = "expand", (args[0], *y.shape[1:])
        viewed = getattr(Tensor, name)(y, *args, **fx.node.map_arg(dict(view.kwargs), value))
        if name in ("reshape", "flatten"):
            try:
                viewed = y.view(viewed.shape)
            except (RuntimeError, ValueError):  # it copies
                return None
        y = viewed
    if y.ndim < 3 or any(stride == 0 for stride in y.stride()[1:]):
        return None
    size, stride = base.shape[dim], base.stride(dim)
    return next((d for d in range(y.ndim) if (y.shape[d], y.stride(d)) == (size, stride)), None)


def repeats_first_dim(node: fx.Node) -> bool:
    """Whether `repeat` adds copies along a first dim of size 1 only."""
    x, repeats = node.args[0], node.args[1:]
    shape = value(x).shape
    return len(repeats) == len(shape) and shape[0] == 1 and all(n == 1 for n in repeats[1:])


def replay(graph: fx.Graph, x: fx.Node, views: list[fx.Node]) -> fx.Node:
    """Apply `views`, last first, to another tensor, without copying it for its memory order."""
    for view in reversed(views):
        if name_of(view) == "contiguous":
            continue
        if name_of(view) == "repeat":  # along the first dim, as a view
            shape = view.args[1], *[-1] * (len(view.args) - 2)
            x = call_method(graph, "expand", x, *shape)
        else:
            places = {view.args[0]: x}
            x = graph.node_copy(view, lambda n, places=places: places.get(n, n))  # type: ignore[misc]
            if x.target == "view":
                x.target = "reshape"
    return x


def call_method(graph: fx.Graph, name: str, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call of a method, and compute its value."""
    node = graph.call_method(name, args, kwargs)
    compute_value(node)
    return node


def compute_value(node: fx.Node) -> None:
    """Compute the fake tensor, or other value, of a new node."""
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), value)
    function: Any = node.target
    if node.op == "call_method":
        function = getattr(type(args[0]), str(node.target))
    with torch.no_grad():
        node.meta["example_value"] = function(*args, **kwargs)
