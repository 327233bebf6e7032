"""A network as a graph of its layers and functions, by torch.fx."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from spikefuse.nn.neuron import Neuron
from spikefuse.nn.pool import MaxPool2d, max_pool2d


class Untraceable(Exception):
    """torch.fx cannot write the network down; the message says why."""


_FX = fx.Tracer()

# A tracer patches nn.Module while it works: two at a time would not clean up.
_tracing = threading.Lock()


class _Proxy(fx.Proxy):
    """Notes what is changed in place: torch.fx takes `x += y` for `x = x + y`."""

    tracer: _Tracer

    def __iadd__(self, other: Any) -> Any:
        return self._changed(self + other)

    def __isub__(self, other: Any) -> Any:
        return self._changed(self - other)

    def __imul__(self, other: Any) -> Any:
        return self._changed(self * other)

    def __itruediv__(self, other: Any) -> Any:
        return self._changed(self / other)

    def _changed(self, result: Any) -> Any:
        self.tracer.changed.append((self.node, result.node))
        return result


class _Tracer(fx.Tracer):
    """Keeps neurons, blocks, the layers of torch.nn and `leaves` whole, adds nothing to the
    network, and leaves the calls of other threads alone."""

    # Code that depends on a buffer's values is none that a graph can stand for.
    proxy_buffer_attributes = True

    def __init__(self, leaves: Collection[nn.Module] = ()) -> None:
        super().__init__(autowrap_functions=(max_pool2d,))
        self.thread = threading.get_ident()
        self.leaves = leaves
        self.changed: list[tuple[fx.Node, fx.Node]] = []
        self.modes = _modes()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        # A graph has no place for contexts.
        if _modes() != self.modes:
            raise Untraceable("its forward switches gradients or autocast on or off")
        return super().create_node(kind, *args, **kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m in self.leaves or is_layer(m)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self.thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_arg(self, a: Any) -> Any:
        # The original would make an attribute of the network of it.
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter) and a not in self.tensor_attrs:
            raise Untraceable(f"its forward makes a tensor of shape {list(a.shape)}")
        return super().create_arg(a)


def _modes() -> tuple[Any, ...]:
    devices = ("cpu", "cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *map(torch.is_autocast_enabled, devices),
        *map(torch.get_autocast_dtype, devices),
    )


@contextlib.contextmanager
def _no_random_numbers() -> Iterator[None]:
    """Refuse random numbers drawn from torch or Python, and put the generators back."""
    state, before = random.getstate(), torch.get_rng_state()
    try:
        yield
        if random.getstate() != state or not torch.equal(torch.get_rng_state(), before):
            raise Untraceable("its forward draws random numbers")
    finally:
        random.setstate(state)
        torch.set_rng_state(before)


def has_hooks(module: nn.Module) -> bool:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in names)


def is_layer(module: nn.Module) -> bool:
    """Whether a graph calls the module as a whole: a layer of torch.nn, a neuron, our pooling, or
    a class with the attribute `is_leaf = True`."""
    leaf = isinstance(module, Neuron | MaxPool2d) or getattr(type(module), "is_leaf", False)
    return leaf or _FX.is_leaf_module(module, "")


def works_in_place(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether the call of a layer or a function changes a tensor in place."""
    name = node.target if isinstance(node.target, str) else node.target.__name__
    return bool(
        getattr(module, "inplace", False)
        or node.kwargs.get("inplace", False)
        or "out" in node.kwargs
        or (module is None and name.endswith("_") and not name.endswith("__"))
    )


def trace(net: nn.Module, leaves: Collection[nn.Module] = (), pure: bool = False) -> fx.Graph:
    """The graph of `net` in its present mode, in which `leaves` are called as they are. Its
    `forward` runs once, without tensors; random numbers that it draws, and attributes that it
    sets, are put back.

    Raises:
        Untraceable: `forward` does something that depends on values, or anything else that only
            works on tensors; with `pure` also if it sets attributes, which the graph does not.
    """
    tracer = _Tracer(leaves)
    try:
        with _tracing, _no_random_numbers(), _attributes_kept(net) as changed:
            graph = tracer.trace(net)
    except Untraceable:
        raise
    except Exception as error:
        # Python meets a stand-in for a tensor in code of any kind, which may raise anything.
        raise Untraceable(f"{type(error).__name__}: {error}") from error
    if changed and pure:
        raise Untraceable(f"its forward sets {', '.join(changed)}")
    for node, result in tracer.changed:
        if any(user > result for user in node.users):
            raise Untraceable("its forward changes a tensor in place and reads it by another name")
    for node in graph.nodes:
        node.type = None  # annotations may be strings, with which a GraphModule can't be pickled
    return graph


@contextlib.contextmanager
def _attributes_kept(net: nn.Module) -> Iterator[list[str]]:
    """Put back what is set meanwhile, and list it."""
    kept = [
        (type(m).__name__, held, dict(held))
        for m in net.modules()
        for held in (vars(m), m._buffers)
    ]
    changed: list[str] = []
    try:
        yield changed
    finally:
        for kind, held, before in kept:
            names = [k for k in {**before, **held} if held.get(k, kept) is not before.get(k, kept)]
            if names:
                changed += [f"{kind}.{name}" for name in names]
                held.clear()
                held.update(before)


def trace_modes(net: nn.Module, leaves: Collection[nn.Module] = (), pure: bool = False) -> fx.Graph:
    """As `trace`: the graph that holds in training and in evaluation alike.

    Raises:
        Untraceable: also where the two differ.
    """
    modes = [(m, m.training) for m in net.modules()]
    try:
        graphs = [trace(net.train(mode), leaves, pure) for mode in (True, False)]
    finally:
        for module, mode in modes:
            module.training = mode
    first, second = (
        [(n.op, n.target, str(n.args), str(n.kwargs)) for n in graph.nodes] for graph in graphs
    )
    if first != second:
        raise Untraceable("its forward differs between training and evaluation")
    return graphs[0]
