"""The pass that cuts a graph into segments, which backward recomputes.

What is alive at a cut is saved, spikes as bits, and what a segment computes is alive while backward
differentiates it. The cuts minimize the bytes of the former plus those of the largest segment.
Tensors are known by their storage, which views share.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import accumulate, compress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module

from spikefuse.graph import operations
from spikefuse.graph.nodes import changed_by, is_mode, name_of, storage_of, value
from spikefuse.memory.spikes import MIN_VALUES
from spikefuse.nn.checkpoint import recompute

_BATCH_NORMS = (F.batch_norm, operations.batch_norm)
#: By which TorchDynamo records calls of torch.utils.checkpoint.
CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


def checkpointed(gm: fx.GraphModule, chunks: int) -> fx.GraphModule:
    """Return a graph with the results of `gm`, of whose segments backward recomputes all but the
    last; at most about `chunks` of them."""
    walk = _Walk(gm.graph)
    cuts = _plan(list(walk.places()), chunks)
    # PyTorch raises an error where a saved tensor was overwritten, but not where it is recomputed.
    if not cuts or _overwrites(gm.graph, walk.binary):
        return gm
    is_first = [i in cuts for i in range(len(walk.nodes))]
    parts = dict(zip(walk.nodes, accumulate(is_first), strict=True))
    split = split_module(gm, gm, parts.__getitem__, keep_original_order=True)
    names = [n.target for n in split.graph.nodes if n.op == "call_module"]
    for name in names[:-1]:
        setattr(split, name, Segment(getattr(split, name), walk.changes))
    return split


def recompute_checkpoints(gm: fx.GraphModule) -> None:
    """Let backward recompute what the network calls by torch.utils.checkpoint as segments."""
    for node in gm.graph.find_nodes(op="call_function", target=CHECKPOINT):
        part, *inputs = node.args
        body = getattr(gm, part.target)
        recompute_checkpoints(body)
        setattr(gm, part.target, Segment(body, {**_changes(gm.graph), **_changes(body.graph)}))
        node.op, node.target, node.args, node.kwargs = "call_module", part.target, (*inputs,), {}
        gm.graph.erase_node(part)
    gm.recompile()


class Segment(nn.Module):
    """A part of a graph. Backward recomputes it on copies of the tensors that the graph changes.

    Args:
        part: the part.
        changed: the storages that the whole graph changes in place.
    """

    def __init__(self, part: fx.GraphModule, changed: Container[int | None]) -> None:
        super().__init__()
        self.part = part
        inputs = [n for n in part.graph.nodes if n.op == "placeholder"]
        self.is_saved = [storage_of(x) not in changed for x in inputs]
        #: Of the inputs that are not saved, whether their values matter.
        self.is_read = [
            _is_read(x) for x, is_saved in zip(inputs, self.is_saved, strict=True) if not is_saved
        ]
        #: Whether it draws random numbers on a GPU; None before its first call.
        self.is_random: bool | None = None

    def forward(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.part(*args)
        changed = [x for x, is_saved in zip(args, self.is_saved, strict=True) if not is_saved]
        copies = [
            x.clone() if is_read else x for x, is_read in zip(changed, self.is_read, strict=True)
        ]

        def first(*saved: Any) -> Any:
            return self._run(args)

        def second(*saved: Any) -> Any:
            unchanged, others = iter(saved), (x.clone() for x in copies)
            return self.part(
                *[next(unchanged if is_saved else others) for is_saved in self.is_saved]
            )

        is_random = self.is_random is not False
        return recompute(first, second, *compress(args, self.is_saved), is_random=is_random)

    def _run(self, args: tuple[Any, ...]) -> Any:
        device = next((x.device for x in args if isinstance(x, Tensor) and x.is_cuda), None)
        if device is None or torch.cuda.is_current_stream_capturing():
            return self.part(*args)
        before = torch.cuda.get_rng_state(device)
        results = self.part(*args)
        has_drawn = not torch.equal(before, torch.cuda.get_rng_state(device))
        self.is_random = has_drawn or bool(self.is_random)
        return results


def _changes(graph: fx.Graph) -> dict[int | None, int]:
    """By storage, the index of the last node that changes it in place."""
    changed = ((storage_of(x), i) for i, n in enumerate(graph.nodes) for x in _changed_by(n))
    return {storage: i for storage, i in changed if storage is not None}


def _changed_by(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node changes in place."""
    if node.op == "call_module":
        segment: Any = node.graph.owning_module.get_submodule(str(node.target))  # type: ignore[union-attr]
        pairs = zip(node.args, segment.is_saved, strict=True)
        return [x for x, is_saved in pairs if not is_saved and isinstance(x, fx.Node)]
    return operations.updated_statistics(node) or changed_by(node)


def _overwrites(graph: fx.Graph, binary: Container[int | None]) -> bool:
    """Whether a node changes a tensor in place that backward of an earlier one may need, and that
    is not saved as bits."""
    read: set[int | None] = set()
    for node in graph.nodes:
        statistics = operations.updated_statistics(node)
        if any(storage_of(x) in read for x in _changed_by(node) if x not in statistics):
            return True
        results = value(node) if isinstance(value(node), tuple | list) else [value(node)]
        if any(isinstance(y, Tensor) and y.requires_grad for y in results):
            tensors = [x for x in node.all_input_nodes if x not in statistics]
            storages = {storage_of(x) for x in tensors if not _are_bits(x, binary)}
            read |= storages - {storage_of(node), None}  # views save nothing
    return False


def _is_read(changed: fx.Node) -> bool:
    """Whether results depend on the values of a tensor that the graph changes."""
    for user in changed.users:
        updates = user.target in (*_BATCH_NORMS, operations.norm_statistics) or not user.users
        if not updates or changed not in _changed_by(user):
            return True
    return False


def _binary_storages(graph: fx.Graph) -> set[int | None]:
    """The tensors that neurons, and poolings of their spikes, register as binary."""
    binary: set[int | None] = set()
    for node in graph.nodes:
        source: Any = node.args[0] if node.args else None
        if node.target is operator.getitem:
            flags = operations.binary_outputs(source)
            is_binary = node.args[1] in range(len(flags)) and flags[node.args[1]]
        else:
            pools = node.target in (F.max_pool2d, operations.max_pool2d)
            is_binary = pools and storage_of(source) in binary
        if is_binary:
            binary.add(storage_of(node))
    return binary


def _are_bits(node: fx.Node, binary: Container[int | None]) -> bool:
    """Whether a tensor is saved as bits, given the storages of spikes."""
    storage = storage_of(node)
    return storage is not None and storage in binary and value(node).numel() >= MIN_VALUES


@dataclass
class _Place:
    """A place in a graph where it can be cut.

    Attributes:
        index: of the node behind it.
        computed: bytes of all that is computed before it.
        alive: by storage, the index of the node that computed it and the bytes that saving takes.
    """

    index: int
    computed: int
    alive: dict[int | None, tuple[int, int]]

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.alive.values())


class _Walk:
    """A walk along a graph, which knows what is alive.

    Attributes:
        computed_by: by storage, the index of the node that computes it.
        alive: the results of earlier nodes that later ones read.
        computed: the bytes of all results.
        modes, grad: the number of modes that the graph is in, and whether gradients are enabled.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.binary, self.changes = _binary_storages(graph), _changes(graph)
        self.last = {x: i for i, node in enumerate(self.nodes) for x in node.all_input_nodes}
        self.computed_by: dict[int | None, int] = {}
        self.alive: list[fx.Node] = []
        self.computed, self.modes, self.grad = 0, 0, True

    def places(self) -> Iterator[_Place]:
        for i, node in enumerate(self.nodes):
            self.alive = [n for n in self.alive if self.last[n] >= i]
            if node.op == "output" or self._can_cut(i):
                alive = {storage_of(n): self._saved(n) for n in self.alive}
                yield _Place(i, self.computed, alive)
            self._step(i, node)

    def _step(self, i: int, node: fx.Node) -> None:
        storage = storage_of(node)
        if node.op in ("placeholder", "get_attr"):
            self.computed_by[storage] = -1
        elif node in self.last and self.computed_by.setdefault(storage, i) >= 0:
            self.alive.append(node)
            if self.computed_by[storage] == i and storage is not None:
                self.computed += value(node).untyped_storage().nbytes()
        if is_mode(node):
            name = name_of(node)
            if name == "_set_grad_enabled":
                self.grad = bool(node.args[0])
            else:
                self.modes += 1 if name.startswith("_enter") else -1

    def _can_cut(self, i: int) -> bool:
        """Whether the graph can be cut before node `i`: only tensors and numbers are alive, and
        none of these tensors is changed later."""
        return (
            self.grad
            and not self.modes
            and all(isinstance(value(n), (Tensor, *_NUMBERS)) for n in self.alive)
            and all(self.changes.get(storage_of(n), -1) < i for n in self.alive)
        )

    def _saved(self, node: fx.Node) -> tuple[int, int]:
        """The node that computed a tensor, and the bytes that saving it takes."""
        x, storage = value(node), storage_of(node)
        if storage is None:
            return -1, 0
        size = x.untyped_storage().nbytes()
        if _are_bits(node, self.binary):
            size = x.numel() // 8
        return self.computed_by[storage], size


def _plan(places: list[_Place], chunks: int) -> set[int]:
    """The indices of the nodes before which to cut a graph."""
    end = places[-1]
    places = [place for place in places if 0 < place.computed < end.computed]
    sizes = [place.num_bytes for place in places]
    around = zip([math.inf, *sizes], sizes, [*sizes[1:], math.inf], strict=False)
    # Only where less is alive than on both sides.
    lowest = [place for place, (a, b, c) in zip(places, around, strict=True) if a >= b < c]
    lowest = [_Place(0, 0, {}), *lowest, end]
    plans = [_partition(lowest, end.computed / n) for n in range(1, chunks + 1)]
    return set(min(plans, key=lambda plan: plan[0])[1])


def _partition(places: list[_Place], most: float) -> tuple[int, list[int]]:
    """The cuts that save least if segments compute at most `most` bytes, as far as places allow it.

    Returns:
        The bytes that are saved, plus those of the largest segment, and the cuts.
    """
    # For each place, of the best cuts up to it: the bytes saved, the largest segment, the cuts.
    plans: list[tuple[int, int, list[int]]] = [(0, 0, [])]
    for j, place in enumerate(places[1:], 1):
        options: list[tuple[int, int, list[int]]] = []
        for i in reversed(range(j)):
            before, size = places[i], place.computed - places[i].computed
            if size > most and options:
                break
            more = sum(n for source, n in place.alive.values() if source >= before.index)
            saved, largest, cuts = plans[i]
            cuts = [*cuts, before.index] if i else cuts
            options.append((saved + more, max(largest, size), cuts))
        plans.append(min(options, key=lambda option: option[:2]))
    saved, largest, cuts = plans[-1]
    return saved + largest, cuts
