"""The pass that lets graphs of Inductor save spikes as bits.

Saved-tensor hooks do not see what a compiled graph saves. This pass changes the joint graph of
forward and backward before PyTorch splits it: backward reads spikes that it unpacks from bits, so
that only the bits are saved.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from spikefuse.kernels import bits
from spikefuse.memory.spikes import MIN_VALUES
from spikefuse.scan.op import implement, library
from spikefuse.scan.program import sizes_of

library.define("pack_spikes(Tensor x, SymInt[] strides) -> Tensor")
_UNPACK = "Tensor bits, Tensor tangent, SymInt[] shape, SymInt[] strides, ScalarType dtype"
library.define(f"unpack_spikes({_UNPACK}) -> Tensor")

_aten, _own = torch.ops.aten, torch.ops.spikefuse
_VIEWS = {
    *(_aten.view, _aten._unsafe_view, _aten.permute, _aten.transpose, _aten.t, _aten.unsqueeze),
    *(_aten.squeeze, _aten.alias, _aten.detach),
}
#: Operations whose result has only values of their first argument, perhaps in another dtype.
_COPIES = {
    *_VIEWS,
    *(_aten.expand, _aten.clone, _aten._to_copy, torch.ops.prims.convert_element_type),
}
#: Those of PyTorch and of Inductor, which defines its own when it is imported.
_MAX_POOLS = ("aten.max_pool2d_with_indices", "prims._low_memory_max_pool_with_offsets")


def save_bits(graph: fx.Graph) -> None:
    """Let backward, in a joint graph, read spikes from bits."""
    tangents = [n for n in graph.nodes if n.op == "placeholder" and "tangents" in str(n.target)]
    backward = {*tangents}
    packed: dict[fx.Node, fx.Node] = {}  # by the spikes
    for node in [*graph.nodes] if tangents else ():
        if backward.isdisjoint(node.all_input_nodes):
            if _is_binary(node, packed):
                with graph.inserting_before(node.next):
                    strides = _known(graph, node, _aten.sym_stride.int)
                    packed[node] = _call(graph, _own.pack_spikes.default, node, strides)
        elif node.op == "call_function":
            backward.add(node)
            for x in node.all_input_nodes:
                if _source(x, _COPIES) in packed:
                    node.replace_input_with(x, _unpack(graph, node, x, packed, tangents[0]))


def _source(node: Any, operations: set[Any]) -> Any:
    """The first node above a chain of operations."""
    while _operation(node) in operations:
        node = node.args[0]
    return node


def _operation(node: Any) -> Any:
    return getattr(node.target, "overloadpacket", None)


def _is_binary(node: fx.Node, others: Container[fx.Node]) -> bool:
    """Whether a node has only zeros and ones, and enough of them to be packed.

    Args:
        others: the nodes before it that do.
    """
    x = node.meta.get("val")
    if node.target is not operator.getitem or not isinstance(x, Tensor):
        return False
    if x.dtype not in bits.DTYPES or (isinstance(x.numel(), int) and x.numel() < MIN_VALUES):
        return False
    call: Any
    index: Any
    call, index = node.args
    operation = _operation(call)
    if operation in (_own.scan, _own.block, _own.recurrent):
        binary = sizes_of(call.args[0])[0]
        return index < len(binary) and binary[index]
    is_pool = str(operation) in _MAX_POOLS and index == 0
    return is_pool and _source(call.args[0], _COPIES) in others


def _call(graph: fx.Graph, function: Any, *args: Any) -> fx.Node:
    """Insert a call, and compute its value."""
    node = graph.call_function(function, args)
    node.meta["val"] = function(*fx.node.map_arg(args, lambda n: n.meta["val"]))
    return node


def _known(graph: fx.Graph, node: fx.Node, function: Any) -> list[Any]:
    """The shape or the strides of a node, as numbers and as calls of `function`."""
    x = node.meta["val"]
    numbers = x.shape if function is _aten.sym_size.int else x.stride()
    return [
        n if isinstance(n, int) else _call(graph, function, node, dim)
        for dim, n in enumerate(numbers)
    ]


def _unpack(
    graph: fx.Graph,
    reader: fx.Node,
    x: fx.Node,
    packed: Mapping[fx.Node, fx.Node],
    tangent: fx.Node,
) -> fx.Node:
    """Insert what computes `x` from bits for its reader; it belongs to backward, because it reads a
    tangent."""
    spikes = _source(x, _VIEWS)
    if spikes not in packed:
        source: Any = x.args[0]
        places = {source: _unpack(graph, reader, source, packed, tangent)}
        with graph.inserting_before(reader):
            return graph.node_copy(x, lambda n: places.get(n, n))
    with graph.inserting_before(x.next):
        layout = [_known(graph, x, f) for f in (_aten.sym_size.int, _aten.sym_stride.int)]
    with graph.inserting_before(reader):
        dtype = x.meta["val"].dtype
        return _call(graph, _own.unpack_spikes.default, packed[spikes], tangent, *layout, dtype)


def _pack_spikes(x: Tensor, strides: Sequence[int]) -> Tensor:
    if x.stride() != tuple(strides):  # Inductor may choose other layouts than the graph shows
        x = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
    return bits.pack(x).bits


def _pack_spikes_fake(x: Tensor, strides: Sequence[int]) -> Tensor:
    return x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8)


def _unpack_spikes(
    packed: Tensor, _: Tensor, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> Tensor:
    return bits.Packed(packed, math.prod(shape), dtype, tuple(shape), tuple(strides)).unpack()


def _unpack_spikes_fake(
    packed: Tensor, _: Tensor, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=packed.device)


implement("pack_spikes", _pack_spikes, _pack_spikes_fake)
implement("unpack_spikes", _unpack_spikes, _unpack_spikes_fake)
