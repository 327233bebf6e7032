"""A network as a graph of its layers and functions, by torch.fx."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, fx, nn

from spikefuse.nn.block import Block, normed
from spikefuse.nn.neuron import Neuron


class Untraceable(Exception):
    """torch.fx cannot write the network down; the message says why."""


_FX = fx.Tracer()

# A tracer patches nn.Module while it works: two at a time would not clean up.
_tracing = threading.Lock()


class _Tracer(fx.Tracer):
    """Keeps neurons, blocks, the layers of torch.nn and `leaves` whole, adds nothing to the
    network, and leaves the calls of other threads alone."""

    # Code that depends on a buffer's values is none that a graph can stand for.
    proxy_buffer_attributes = True

    def __init__(self, leaves: Collection[nn.Module] = ()) -> None:
        super().__init__(autowrap_functions=(normed,))
        self.thread = threading.get_ident()
        self.leaves = leaves

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


def is_layer(module: nn.Module) -> bool:
    """Whether a graph calls the module as one thing."""
    return isinstance(module, Neuron | Block) or _FX.is_leaf_module(module, "")


def trace(net: nn.Module, leaves: Collection[nn.Module] = ()) -> fx.Graph:
    """The graph of `net` in its present mode, in which `leaves` are called as they are. Its
    `forward` runs once, without tensors; random numbers that it draws are put back.

    Raises:
        Untraceable: `forward` does something that depends on values, or anything else that only
            works on tensors.
    """
    try:
        with _tracing, torch.random.fork_rng(devices=[]):
            graph = _Tracer(leaves).trace(net)
    except Untraceable:
        raise
    except Exception as error:
        # Python meets a stand-in for a tensor in code of any kind, which may raise anything.
        raise Untraceable(f"{type(error).__name__}: {error}") from error
    for node in graph.nodes:
        node.type = None  # annotations may be strings, with which a GraphModule can't be pickled
    return graph


def trace_modes(net: nn.Module, leaves: Collection[nn.Module] = ()) -> fx.Graph:
    """As `trace`: the graph that holds in training and in evaluation alike.

    Raises:
        Untraceable: also where the two differ.
    """
    modes = [(m, m.training) for m in net.modules()]
    try:
        graphs = [trace(net.train(mode), leaves) for mode in (True, False)]
    finally:
        for module, mode in modes:
            module.training = mode
    first, second = (
        [(n.op, n.target, str(n.args), str(n.kwargs)) for n in graph.nodes] for graph in graphs
    )
    if first != second:
        raise Untraceable("its forward differs between training and evaluation")
    return graphs[0]
