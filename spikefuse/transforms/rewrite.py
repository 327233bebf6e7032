"""Parts of a model replaced by graphs, with every layer where it was."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import fx, nn

from spikefuse.nn.tracing import Untraceable, is_layer, trace_modes

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# What a graph takes over as it is, whether the graph needs it or not.
CONTENT = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training")


class Rewritten(fx.GraphModule):
    """A graph in place of the `forward` of `root`, with its layers, tensors and attributes, which
    an fx.GraphModule would keep in part and in another order."""

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        super().__init__(root, graph, "Rewritten")
        for name, value in vars(root).items():
            if name in CONTENT or name not in vars(self):
                self.__dict__[name] = copy.copy(value) if name in CONTENT else value

    def _deepcopy_init(self) -> Callable[..., None]:
        return Rewritten.__init__

    def __copy__(self) -> Rewritten:
        return Rewritten(self, self.graph)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, super().__reduce__()


def _unpickled(restore: Callable[..., fx.GraphModule], arguments: tuple[Any, ...]) -> Rewritten:
    module, root = restore(*arguments), nn.Module()
    root.__dict__ = arguments[0]
    return Rewritten(root, module.graph)


def has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, name) for name in HOOKS)


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` gave the module, which can't be copied without its content."""
    # Its own module takes long to import, and has been if anything is compiled.
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def divide(net: nn.Module) -> tuple[dict[nn.Module, fx.Graph], dict[nn.Module, str]]:
    """The largest parts of a network that can be traced.

    Returns:
        The graph of each part, and why the modules around parts can't be traced themselves. In a
        graph these are called as they are, as layers. What torch.compile gave has no parts.
    """
    graphs: dict[nn.Module, fx.Graph] = {}
    compiled = [m for m in net.modules() if is_compiled(m)]
    closed = dict.fromkeys(compiled, "torch.compile has compiled it")
    left = {m for outer in compiled for m in outer.modules()}
    for module in reversed(list(net.modules())):
        if has_hooks(module) and not is_layer(module):
            if module not in left:
                graphs |= _inside(module, closed)
            closed.setdefault(module, "it has hooks")
    return graphs | _parts(net, closed), closed


def _parts(module: nn.Module, closed: dict[nn.Module, str]) -> dict[nn.Module, fx.Graph]:
    """The parts of a module; those that can't be traced are added to `closed`."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return _inside(module, closed)
    if module in closed or is_layer(module):
        return {}
    try:
        return {module: _traced(module, closed)}
    except Untraceable as error:
        reason = error
    before = set(closed)
    inside = _inside(module, closed)
    if closed.keys() - before:
        with contextlib.suppress(Untraceable):
            graph = _traced(module, closed)
            # Of the parts only those remain that this graph does not run through.
            kept = {m for other in closed.keys() - before for m in other.modules()}
            return {module: graph} | {m: g for m, g in inside.items() if m in kept}
    closed[module] = f"torch.fx cannot trace it: {reason}"
    return inside


def _inside(module: nn.Module, closed: dict[nn.Module, str]) -> dict[nn.Module, fx.Graph]:
    found: dict[nn.Module, fx.Graph] = {}
    for child in module.children():
        found |= _parts(child, closed)
    return found


def _traced(module: nn.Module, closed: Mapping[nn.Module, str]) -> fx.Graph:
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        raise Untraceable("its state dict is more than its tensors: it defines get_extra_state")
    return trace_modes(module, closed, pure=True)


def rebuilt(
    model: nn.Module,
    graphs: Mapping[nn.Module, fx.Graph],
    others: Mapping[nn.Module, nn.Module] | None = None,
    left: Collection[nn.Module] = (),
) -> nn.Module:
    """`model` with `graphs` in place of the parts they are of, and with `others` in place of
    modules, but not inside of those `left`. What is around them is copied, without its content;
    the rest is that of `model`."""
    made = {module: module for module in left} | dict(others or {})

    def build(module: nn.Module) -> nn.Module:
        if module in made:
            return made[module]
        children = {
            name: None if child is None else build(child) for name, child in module._modules.items()
        }
        result = module
        if any(child is not module._modules[name] for name, child in children.items()):
            result = copy.copy(module)
            result._modules = children
        if module in graphs:
            result = Rewritten(result, graphs[module])
        made[module] = result
        return result

    return build(model)
