"""Trace a network to a torch.fx graph of its layers and functions."""

from __future__ import annotations

import contextlib
import operator
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules import batchnorm, conv, dropout, pooling

from spikefuse.neurons.definition import Neuron
from spikefuse.nn import constant_input
from spikefuse.nn.activations import ACTIVATIONS, METHODS
from spikefuse.nn.call import require_temporal
from spikefuse.nn.pool import MaxPool2d, max_pool2d

# Layers and functions that are deterministic and, batch statistics aside, compute each row along
# dim 0 alone.
_LAYERS = (
    *(kind for kind in ACTIVATIONS if kind is not nn.RReLU),
    conv._ConvNd,
    batchnorm._BatchNorm,
    dropout._DropoutNd,
    pooling._MaxPoolNd,
    pooling._AvgPoolNd,
    pooling._AdaptiveAvgPoolNd,
    pooling._AdaptiveMaxPoolNd,
    nn.Linear,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.Identity,
    nn.Flatten,
)
_FUNCTIONS = {
    *constant_input.POINTWISE,
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.neg),
    *(F.linear, F.conv1d, F.conv2d, F.conv3d, F.layer_norm, F.group_norm),
    *constant_input.POOLS,
    max_pool2d,
}
_METHODS = {*METHODS, "float", "contiguous", "add", "sub", "mul", "div"}


class Untraceable(Exception):
    """torch.fx cannot trace the network; the message says why."""


_FX = fx.Tracer()

# A tracer patches nn.Module while it runs: two at a time would not restore it.
_tracing = threading.Lock()


class _Proxy(fx.Proxy):
    """A proxy that records in-place operators: torch.fx traces `x += y` as `x = x + y`."""

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
    """A tracer whose leaves are neurons, blocks, the layers of torch.nn and modules with hooks.

    It does not modify the network, and does not trace calls from other threads.
    """

    # Control flow that depends on a buffer's values cannot be traced.
    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__(autowrap_functions=(max_pool2d,))
        self.thread = threading.get_ident()
        self.changed: list[tuple[fx.Node, fx.Node]] = []
        self.modes = _modes()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        # A graph cannot represent context managers.
        if _modes() != self.modes:
            raise Untraceable("its forward switches gradients or autocast on or off")
        return super().create_node(kind, *args, **kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_leaf(m)

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
        # torch.fx would make the tensor an attribute of the network.
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter) and a not in self.tensor_attrs:
            raise Untraceable(f"its forward makes a tensor of shape {list(a.shape)}")
        return super().create_arg(a)


def trace(net: nn.Module) -> fx.Graph:
    """Return the graph of `net` in its current mode.

    `forward` runs once, without tensors. Random generators, attributes and the mode of gradients
    that it changes are restored.

    Raises:
        Untraceable: `forward` depends on values or random numbers, or does anything else that only
            works on tensors.
    """
    tracer = _Tracer()
    try:
        mode = torch.set_grad_enabled(torch.is_grad_enabled())
        with mode, _tracing, _no_random_numbers(), _restored_attributes(net):
            graph = tracer.trace(net)
    except Untraceable:
        raise
    except Exception as error:
        # User code may raise anything when it receives a proxy.
        raise Untraceable(f"{type(error).__name__}: {error}") from error
    for node, result in tracer.changed:
        if any(user > result for user in node.users):
            raise Untraceable("its forward changes a tensor in place and reads it by another name")
    return graph


def is_leaf(module: nn.Module) -> bool:
    """Whether a graph calls the module instead of containing what it computes."""
    leaf = isinstance(module, Neuron | MaxPool2d) or getattr(type(module), "is_leaf", False)
    # Hooks must see tensors, and run in every call.
    return leaf or has_hooks(module) or _FX.is_leaf_module(module, "")


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks, other than the one that a converted network has."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = (hook for name in names for hook in getattr(module, name).values())
    return any(hook is not require_temporal for hook in hooks)


def works_in_place(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether the call of a layer or a function changes a tensor in place."""
    name = node.target if isinstance(node.target, str) else node.target.__name__
    return bool(
        getattr(module, "inplace", False)
        or node.kwargs.get("inplace", False)
        or "out" in node.kwargs
        or (module is None and name.endswith("_") and not name.endswith("__"))
    )


def is_by_row(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether a call is deterministic and, batch statistics aside, computes each row alone."""
    if module is None:
        if node.target in (torch.flatten, "flatten"):
            return len(node.args) > 1 and isinstance(node.args[1], int) and node.args[1] > 0
        return node.target in (_METHODS if node.op == "call_method" else _FUNCTIONS)
    if isinstance(module, nn.Flatten):
        return module.start_dim > 0
    if isinstance(module, nn.SyncBatchNorm):
        return False
    is_random = isinstance(module, dropout._DropoutNd) and module.training
    return isinstance(module, _LAYERS) and not is_random


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
    """Refuse random numbers drawn from torch or Python, and restore the generators."""
    state, before = random.getstate(), torch.get_rng_state()
    try:
        yield
        if random.getstate() != state or not torch.equal(torch.get_rng_state(), before):
            raise Untraceable("its forward draws random numbers")
    finally:
        random.setstate(state)
        torch.set_rng_state(before)


@contextlib.contextmanager
def _restored_attributes(net: nn.Module) -> Iterator[None]:
    attributes = [(d, dict(d)) for m in net.modules() for d in (vars(m), m._buffers)]
    try:
        yield
    finally:
        for current, before in attributes:
            if current.keys() != before.keys() or any(current[k] is not before[k] for k in before):
                current.clear()
                current.update(before)
