"""The pass that replaces batch norm → [multiply →] [add →] neuron by a block.

The bias of a convolution, which cuDNN adds in a pass of its own, is a norm that only shifts. The
statistics of the batch are taken where the norm stood, so that running statistics change in
their original order, and the block stands where the scan stood.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from spikefuse.block.definition import Kind
from spikefuse.block.functional import Norm, eps_of_step, reserve_counters
from spikefuse.block.program import prepare_block
from spikefuse.graph import operations
from spikefuse.graph.nodes import (
    ADDITIONS,
    IN_PLACE_ADDITIONS,
    PRODUCTS,
    RESHAPES,
    arguments_of,
    call_method,
    changed_by,
    changes_something,
    dim_after,
    has_one_reader,
    have_one_module,
    is_mode,
    is_view,
    name_of,
    replay,
    storage_of,
    synchronized,
    value,
    views_above,
)
from spikefuse.graph.operations import ScanNode
from spikefuse.graph.report import GraphReport
from spikefuse.kernels.running import Running
from spikefuse.nn.neuron import DTYPES
from spikefuse.scan.program import program

# Values of an input from which a block on a CPU is not slower than separate norm and neuron,
# measured on two cores after a convolution. Smaller inputs stay in the caches.
MIN_VALUES = 5 << 18
CONVOLUTIONS = {torch.conv1d, torch.conv2d, torch.conv3d}


class NotFusible(Exception):
    """Why a norm and a neuron cannot become a block."""


@dataclass
class Summand:
    """What a neuron reads, or one side of a sum that it reads.

    Attributes:
        end: the last node.
        scan: the neuron.
        after: the views between the sum and the neuron.
        views: the views between the norm and `end`, last first.
        norm: the batch norm, or the convolution with a bias, or what else is above the views.
        product: of the norm and a factor, between the views; None if there is none.
        late: how many of the views are after the product.
        factor: the other side of the product.
        path: the views from the norm to the neuron, last first, without those that are undone.
        fits_block: whether it is a norm, or adds a bias, that a block can compute.
        obstacle: why it cannot.
    """

    end: fx.Node
    scan: ScanNode
    after: list[fx.Node]
    norm: fx.Node = field(init=False)
    views: list[fx.Node] = field(init=False)
    product: fx.Node | None = None
    late: int = 0
    factor: fx.Node | None = None
    path: list[fx.Node] = field(init=False)
    obstacle: str = field(init=False)

    def __post_init__(self) -> None:
        self.norm, self.views = views_above(self.end)
        for side, factor in _sides_of_product(self.norm):
            norm, views = views_above(side)
            if has_one_reader(norm) and _is_norm(norm):
                self.product, self.factor, self.late = self.norm, factor, len(self.views)
                self.norm, self.views = norm, [*self.views, *views]
                break
        is_undone = self.product is not None and _shape(self.product) == _shape(self.scan.inputs[0])
        self.path = self.views[self.late :] if is_undone else [*self.after, *self.views]
        self.obstacle = _obstacle(self.norm) or self._obstacle_of_factor()

    @property
    def fits_block(self) -> bool:
        return not self.obstacle

    @property
    def only_shifts(self) -> bool:
        return _adds_bias(self.norm)

    @property
    def nodes(self) -> list[fx.Node]:
        """The norm, and all nodes between it and `end`, last first."""
        product = [] if self.product is None else [self.product]
        return [*self.views[: self.late], *product, *self.views[self.late :], self.norm]

    def _obstacle_of_factor(self) -> str:
        """Why a block cannot multiply the norm by the factor; "" if it can."""
        if self.factor is None:
            return ""
        x, factor, product = map(value, (self.scan.inputs[0], self.factor, self.product))
        after = {name_of(view) for view in (*self.after, *self.views[: self.late])}
        # Time may be folded into the batch if the factor has neither.
        is_folded = product.shape[1:] == x.shape[2:] and factor.ndim < product.ndim
        if not (product.shape == x.shape or is_folded) or not after <= RESHAPES:
            return "its product with another tensor changes shape"
        if (factor.dtype, factor.device) != (x.dtype, x.device) or factor.is_inference():
            return "its product is with a tensor of another dtype or device"
        return ""


@dataclass
class Match:
    """norm → [add →] views → scan.

    Attributes:
        norms: one, or two if the residual is normalized, too.
        residual: what else is added; None if nothing is.
        views: between the sum, or the norm, and the scan, last first.
        read: the sum, or the norm, that the views are applied to.
        channel_dim: of the scan's input.
    """

    scan: ScanNode
    norms: list[Summand]
    residual: fx.Node | None
    views: list[fx.Node]
    read: fx.Node
    channel_dim: int

    @property
    def returns_sum(self) -> bool:
        """Whether others read what the neuron reads."""
        return len(self.read.users) > 1


def fuse_norms(graph: fx.Graph, report: GraphReport) -> None:
    """Replace norms and neurons by blocks where this changes no result."""
    _read_sums_in_place(graph)
    _read_sizes_above(graph)
    for node in list(graph.nodes):
        if ScanNode.is_scan(node):
            scan = ScanNode(node)
            order = {node: i for i, node in enumerate(graph.nodes)}
            try:
                match = _match(scan, order)
            except NotFusible as reason:
                for norm in _norms_above(scan):
                    report.leave(norm, str(reason))
            else:
                for summand in match.norms:
                    if summand.only_shifts:
                        report.num_biases += 1
                    else:
                        report.fuse(summand.norm, node, match.read.target in ADDITIONS)
                _replace(graph, match)
    for node in graph.nodes:
        if node.target is F.batch_norm:
            report.leave(node, _reader_of(node))


def _read_sums_in_place(graph: fx.Graph) -> None:
    """Let what reads a norm after an addition in place read the result of the addition."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.find_nodes(op="call_method", target="add_"):
        norm, start = node.args[0], order[node]
        if _is_norm(norm):
            norm.replace_all_uses_with(node, lambda n, start=start: order[n] > start)


def _read_sizes_above(graph: fx.Graph) -> None:
    """Read sizes of a norm from its input, which has the same shape."""
    for node in graph.find_nodes(op="call_method", target="size"):
        norm, *dim = node.args
        if norm.target is F.batch_norm:
            node.args = _settings(norm)["input"], *dim


def _match(scan: ScanNode, order: dict[fx.Node, int]) -> Match:
    """The block that ends in a scan.

    Raises:
        NotFusible: there is none.
    """
    if len(scan.inputs) != 1:
        raise NotFusible("its neuron has several inputs")
    read, views = views_above(scan.inputs[0])
    if not has_one_reader(read):
        _check_sum_is_returnable(scan, read, views, order)
    summands, residual = [Summand(read, scan, views)], None
    if isinstance(read, fx.Node) and read.target in ADDITIONS:
        summands = _summands(read, scan, views, order)
    norms = [s for s in summands if s.fits_block]
    if not norms:
        raise NotFusible(summands[0].obstacle)
    dims = [dim_after(s.path, value(s.norm), 1) for s in norms]
    if len(norms) == 2 and not (dims[0] == dims[1] and _can_share_block(norms)):
        norms = norms[:1]
    channel = dims[0]
    if len(summands) > len(norms):
        residual = summands[len(norms)].end
    if not channel or (channel != 2 and (scan.states or scan.final)):  # 0 is time
        raise NotFusible("its channels are not a dim of the neuron's input")
    x = value(_settings(norms[0].norm)["input"])
    if x.dtype != value(scan.inputs[0]).dtype:
        raise NotFusible("the neuron reads another dtype")
    if x.device.type == "cpu" and x.numel() < MIN_VALUES and not operations.shares_time():
        raise NotFusible(
            f"its input has {int(x.numel()):,} values: on a CPU, fusing helps from {MIN_VALUES:,}"
        )
    reads = {storage_of(_settings(s.norm)[name]) for s in norms for name in ("input", "bias")}
    reads = {*reads, storage_of(residual), storage_of(norms[0].factor)} - {None}
    first, last = min(order[s.norm] for s in norms), order[scan.node]
    own = order[read] if read.target in IN_PLACE_ADDITIONS else -1
    between = [n for n, i in order.items() if first < i < last and i != own]
    known = reads | {storage_of(x) for s in norms for x in _running_statistics(s.norm)}
    updated = {storage_of(x) for n in between for x in operations.updated_statistics(n)}
    if any(map(changes_something, between)) or known & updated:
        raise NotFusible("a tensor or a mode may change between it and its neuron")
    if any(i > last and storage_of(x) in reads for n, i in order.items() for x in changed_by(n)):
        raise NotFusible("a tensor that a block would save is changed in place later")
    return Match(scan, norms, residual, views, read, channel)


def _shape(node: fx.Node) -> torch.Size:
    shape: torch.Size = value(node).shape
    return shape


def _sides_of_product(node: Any) -> list[tuple[fx.Node, fx.Node]]:
    """Each side of a product that only one node reads, and the other side, if the side has the
    shape and dtype of the product."""
    if not has_one_reader(node) or node.target not in PRODUCTS or node.kwargs:
        return []
    sides: Any = node.args
    if not all(isinstance(value(x), Tensor) for x in sides) or sides[0] is sides[1]:
        return []
    y = value(node)
    return [
        (x, other) for x, other in (sides, sides[::-1])
        if (value(x).shape, value(x).dtype) == (y.shape, y.dtype)
    ]  # fmt: skip


def _running_statistics(norm: fx.Node) -> list[Any]:
    """The running statistics that a block reads in place of a norm in evaluation."""
    arguments = _settings(norm)
    return [] if arguments["training"] else [arguments["running_mean"], arguments["running_var"]]


def _summands(
    add: fx.Node, scan: ScanNode, after: list[fx.Node], order: dict[fx.Node, int]
) -> list[Summand]:
    """Both sides of a sum, norms first, biases next, and of two the one called last first."""
    sides: Any = add.args
    values = [value(x) for x in sides]
    if len(sides) != 2 or add.kwargs not in ({}, {"alpha": 1}) or sides[0] is sides[1]:
        raise NotFusible("its sum is not one of two tensors")
    if not all(isinstance(v, Tensor) for v in values) or (
        (values[0].shape, values[0].dtype) != (values[1].shape, values[1].dtype)
    ):
        raise NotFusible("its sum broadcasts, or changes the dtype")
    summands = [Summand(x, scan, after) for x in sides]
    for s in summands:
        if s.fits_block and not has_one_reader(s.norm):
            s.obstacle = "its result is also read by something else"
    if add.target in IN_PLACE_ADDITIONS and not summands[0].fits_block:
        raise NotFusible("the sum changes another tensor in place")
    return sorted(
        summands, key=lambda s: (s.fits_block, not s.only_shifts, order[s.norm]), reverse=True
    )


def _check_sum_is_returnable(
    scan: ScanNode, read: fx.Node, views: list[fx.Node], order: dict[fx.Node, int]
) -> None:
    """Check that a block can also return what the neuron reads, because others read it later."""
    first = views[-1] if views else scan.node
    later = all(n is first or order[n] > order[scan.node] for n in read.users)
    is_known = read.target in ADDITIONS - IN_PLACE_ADDITIONS or read.target is F.batch_norm
    keeps_order = {name_of(v) for v in views} <= RESHAPES
    if not (is_known and later and keeps_order):
        raise NotFusible("its result is also read by something else")
    if any(name_of(n) == "register_hook" for x in (read, *views) for n in x.users):
        raise NotFusible("a hook sees the gradient of its result")
    returned = read.graph.output_node().all_input_nodes
    if value(read).requires_grad and storage_of(read) in map(storage_of, returned):
        # The spikes have a gradient with respect to it, but not to the sum that a block returns.
        raise NotFusible("its result is returned")


def _can_share_block(norms: list[Summand]) -> bool:
    """Whether one block can compute both norms."""
    if any(synchronized(s.norm) or s.product is not None for s in norms):
        return False
    if any(s.only_shifts for s in norms):
        return all(s.only_shifts for s in norms)
    first, second = (_settings(s.norm) for s in norms)
    weights = value(first["weight"]), value(second["weight"])
    if first["training"] != second["training"] or None in weights:
        return False
    return bool(weights[0].dtype == weights[1].dtype)


def _is_norm(node: Any) -> bool:
    return isinstance(node, fx.Node) and (node.target is F.batch_norm or _adds_bias(node))


def _adds_bias(node: Any) -> bool:
    """Whether a node is a convolution of `[N, C, ...]` with a bias."""
    if not (isinstance(node, fx.Node) and node.target in CONVOLUTIONS) or node.kwargs:
        return False
    is_batch = value(node).ndim == value(node.args[1]).ndim
    return is_batch and len(node.args) > 2 and node.args[2] is not None


def _settings(norm: fx.Node) -> dict[str, Any]:
    """The arguments of a batch norm, or of one in place of the bias of a convolution."""
    if not _adds_bias(norm):
        return arguments_of(norm, F.batch_norm)
    names = "input", "running_mean", "running_var", "weight", "bias"
    settings = dict.fromkeys(names) | {"input": norm, "bias": norm.args[2]}
    return settings | {"training": False, "momentum": 0.0, "eps": 0.0}


def _obstacle(node: fx.Node) -> str:
    """Why a block cannot compute a node that a neuron or a sum reads; "" if it can."""
    if not _is_norm(node):
        return "another operation is between it and the neuron"
    arguments = _settings(node)
    names = "input", "weight", "bias", "running_mean", "running_var"
    x, *others = tensors = [value(arguments[name]) for name in names]
    settings = arguments["training"], arguments["momentum"], arguments["eps"]
    if any(isinstance(s, fx.Node) for s in settings):
        return "its momentum or eps is computed, or has changed"
    if any(t is not None and t.dtype not in DTYPES for t in tensors):
        return "it has a dtype that a block does not take"
    if any(t is not None and (t.device != x.device or t.is_inference()) for t in tensors):
        return "its tensors are on several devices, or of inference mode"
    if any(t is not None and not t.is_contiguous() for t in others):
        return "its parameters are not contiguous"
    # In training, torch.nn refuses one value per channel, too.
    too_few = x.shape[1] if arguments["training"] else 0
    return "its input has too few values" if x.numel() <= too_few else ""


def _norms_above(scan: ScanNode) -> list[fx.Node]:
    """The norms whose result a scan reads, directly or in a sum."""
    read, views = views_above(scan.inputs[0])
    is_sum = isinstance(read, fx.Node) and read.target in ADDITIONS
    sides: Any = read.args[:2] if is_sum else [read]
    tops = [Summand(x, scan, views).norm for x in sides]
    return [x for x in tops if isinstance(x, fx.Node) and x.target is F.batch_norm]


def _reader_of(node: fx.Node) -> str:
    """Why a norm that no neuron reads was left alone."""
    reader = node
    while reader is node or is_view(reader):
        if len(reader.users) != 1:
            return "its result is read by several operations"
        (reader,) = reader.users
    is_last = reader.op == "output"
    return f"its result is read by {'the end of the graph' if is_last else name_of(reader)}"


def _replace(graph: fx.Graph, match: Match) -> None:
    """Replace the nodes of a match by statistics and a block."""
    scan, settings = match.scan, [_settings(s.norm) for s in match.norms]
    only_shifts = match.norms[0].only_shifts
    training = settings[0]["training"]
    kind = Kind(
        has_residual=len(match.norms) > 1 or match.residual is not None,
        by_batch=training,
        normalizes_residual=len(match.norms) > 1 and not only_shifts,
        returns_sum=match.returns_sum,
        has_factor=match.norms[0].factor is not None,
        only_shifts=only_shifts,
    )
    alone, norms = program(scan.program), list[Any]()
    if not (training or only_shifts or any(map(is_mode, graph.nodes))):
        affine = [(a["weight"], a["bias"], a["eps"]) for a in settings]
        kind = kind._replace(eps=eps_of_step(alone.backend, affine))
    made = prepare_block(alone.definition, alone.backend, kind)
    reserve_counters(alone.backend, value(scan.inputs[0]).device)
    for summand, a in zip(match.norms, settings, strict=True):
        if training:
            counter = _counter_of(summand.norm)
            with graph.inserting_before(summand.norm):
                batches: Any = None if counter is None else counter.args[0]
                running = Running(a["running_mean"], a["running_var"], batches, a["momentum"])
                repeats = summand.norm.meta.get("repeats", 1)
                batch = graph.call_function(
                    operations.norm_statistics,
                    (a["input"], a["weight"], running, a["eps"], alone.backend, repeats),
                    synchronized(summand.norm),
                )
            if counter is not None:
                graph.erase_node(counter)
            statistics: Any = batch
            norms.append(Norm(a["weight"], a["bias"], a["eps"], statistics))
        else:
            if only_shifts:
                with graph.inserting_before(summand.norm):
                    a["input"] = graph.node_copy(summand.norm)
                a["input"].update_arg(2, None)
            known = {"mean": a["running_mean"], "variance": a["running_var"]}
            norms.append(Norm(a["weight"], a["bias"], a["eps"], **known))
    with graph.inserting_before(scan.node):
        inputs = [
            replay(graph, a["input"], s.path) for a, s in zip(settings, match.norms, strict=True)
        ]
        if match.residual is not None:
            inputs.append(replay(graph, match.residual, match.views))
        if kind.has_factor:
            inputs.append(graph.call_method("expand_as", (match.norms[0].factor, inputs[0])))
        moves = match.channel_dim != 2
        if moves:
            inputs = [graph.call_method("movedim", (x, match.channel_dim, 2)) for x in inputs]
        arguments = scan.block_arguments(made, inputs, norms)
        shared = synchronized(match.norms[0].norm)
        block = graph.call_function(operations.run_block, arguments, shared)
        if moves:
            outputs = [graph.call_function(operator.getitem, (block, i))
                       for i in range(made.program.step.num_outputs)]  # fmt: skip
            block = graph.call_function(operations.move_dim, (outputs, 2, match.channel_dim))
        if match.returns_sum:
            total = graph.call_function(operator.getitem, (block, -1))
            total = graph.call_method("reshape", (total, _sizes_of_sum(graph, match, settings)))
            total.meta.update(match.read.meta)
    block.meta.update(scan.node.meta)
    scan.node.replace_all_uses_with(block)
    if match.returns_sum:
        first = match.views[-1] if match.views else scan.node
        match.read.replace_all_uses_with(total, delete_user_cb=lambda n: n is not first)
    _erase(graph, match)


def _sizes_of_sum(
    graph: fx.Graph, match: Match, settings: Sequence[dict[str, Any]]
) -> tuple[Any, ...]:
    """The sizes of what the views read, of which those that differ between calls are computed."""
    sizes: list[Any] = list(value(match.read).shape)
    unknown = [dim for dim, size in enumerate(sizes) if not isinstance(size, int)]
    for dim in unknown[:1]:
        sizes[dim] = -1
    if len(unknown) > 1:
        like = match.residual or replay(graph, settings[0]["input"], match.norms[0].views)
        for dim in unknown[1:]:
            sizes[dim] = call_method(graph, "size", like, dim)
    return tuple(sizes)


def _counter_of(norm: fx.Node) -> fx.Node | None:
    """The node that counts the batches of a norm, which its statistics can do as well."""
    for node in norm.graph.nodes:
        if node.target == "add_" and have_one_module(node, norm) and not node.users:
            count, *added = node.args
            x, is_alone = value(count), all(n.target == "add_" for n in count.users)
            is_known = isinstance(x, Tensor) and x.dtype == torch.int64 and added == [1]
            if is_known and is_alone and x.device == value(norm).device:
                return node
    return None


def _erase(graph: fx.Graph, match: Match) -> None:
    graph.erase_node(match.scan.node)
    nodes = [*match.views]
    if match.read.target in ADDITIONS:
        nodes.append(match.read)
    for summand in match.norms:
        nodes += summand.nodes
    for node in nodes:
        graph.erase_node(node)
