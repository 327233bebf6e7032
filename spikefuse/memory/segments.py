"""Split a network into segments, which `Checkpoint` recomputes one by one.

A segment computes one saved value from earlier ones: the output of a neuron, a value that several
segments read, or an output of the network.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from spikefuse.block.batch_norm import NORMS, CollectiveNorm
from spikefuse.block.block import NAMES, Block, can_normalize_residual, scan
from spikefuse.block.fused_norm import FusedNorm
from spikefuse.kernels.norm import by_batch
from spikefuse.memory.tracing import (
    Untraceable,
    has_hooks,
    is_by_row,
    is_leaf,
    trace,
    works_in_place,
)
from spikefuse.neurons.definition import Neuron
from spikefuse.nn.call import Scan
from spikefuse.nn.neuron import scan_neuron
from spikefuse.nn.pool import MaxPool2d, max_pool2d

_MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, MaxPool2d)
_ADDS = (operator.add, torch.add, "add", "add_")


@dataclass(frozen=True)
class BlockCall:
    """A call of a norm and a neuron as one block, on (x,) or (x, residual).

    Attributes:
        norms: of x, and of the residual if it has one.
    """

    norms: tuple[_BatchNorm, ...]
    neuron: Neuron
    inputs: tuple[fx.Node, ...]

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return *self.norms, self.neuron


@dataclass(frozen=True)
class NeuronCall:
    """A call of a neuron, alone or after norms that do not use batch statistics.

    Attributes:
        scan: runs the call on all inputs.
        modules: the neuron, after its norms if there are any.
    """

    scan: Scan
    num_states: int
    modules: tuple[nn.Module, ...]
    inputs: tuple[fx.Node, ...]


@dataclass(frozen=True, eq=False)
class Segment:
    """The computation of one saved value from others.

    Attributes:
        target: the saved value.
        inputs: the saved values from which it is computed.
        parameters: all parameters that it reads.
        is_recomputed: whether backward recomputes it; otherwise its autograd graph is saved.
        by_sample: whether samples are independent, except for the statistics of `block`.
        block: the block that computes `target`, if its norms use batch statistics.
        neuron: any other neuron that computes `target`.
    """

    target: fx.Node
    inputs: tuple[fx.Node, ...]
    parameters: tuple[nn.Parameter, ...]
    is_recomputed: bool
    by_sample: bool
    block: BlockCall | None
    neuron: NeuronCall | None


class Segments:
    """The segments of a network in one mode, in the order of its forward pass.

    Raises:
        ValueError: torch.fx cannot trace the network, it is not fused, or a layer works in place.
    """

    def __init__(self, net: nn.Module) -> None:
        self.net, self.graph = net, _traced(net)
        self.called = {
            n: net.get_submodule(str(n.target)) for n in self.graph.nodes if n.op == "call_module"
        }
        self.blocks = self._find_blocks()
        _check_norms(net, bool(self.blocks))
        self.modules = tuple(net.modules())
        self.parameters = _all_parameters(self.modules)
        self.modes = _modes(self.modules)
        #: `Values.num_bytes`, by segment and kind of call.
        self.sizes: dict[tuple[Any, ...], tuple[int, int]] = {}
        nodes = list(self.graph.nodes)
        (self.input,) = (node for node in nodes if node.op == "placeholder")
        #: The return value of the network, nodes in any nesting.
        self.output = nodes[-1].args[0]
        #: The nodes in `output`, each once.
        self.outputs = tuple(nodes[-1].all_input_nodes)
        varying = _varying(self.graph)
        for node in nodes[:-1]:
            if works_in_place(node, self.called.get(node)):
                raise ValueError(
                    f"memory=Checkpoint() can't recompute '{node.target}', which works in "
                    "place: pass inplace=False, or use another policy"
                )
        self._segments = list(self._cut([n for n in nodes if n in varying], varying))
        #: The modules that backward calls, and the attributes of other modules that it reads.
        self.modules_read = tuple(dict.fromkeys(self._modules_read(nodes)))
        self.attributes_read = tuple(self._attributes_read(nodes))

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments)

    def __reversed__(self) -> Iterator[Segment]:
        return reversed(self._segments)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copied network computes its own segments

    def fits(self, net: nn.Module) -> bool:
        """Whether the network still has the same modules and parameters in the same modes.

        Hooks count, and so do the numbers and strings that are attributes of traced modules, since
        they are constants of the graph.
        """
        modules = tuple(net.modules())
        return (
            _are_same(modules, self.modules)
            and _are_same(_all_parameters(modules), self.parameters)
            and _modes(modules) == self.modes
        )

    def _attributes_read(self, nodes: list[fx.Node]) -> Iterator[tuple[nn.Module, str]]:
        for node in nodes:
            if node.op == "get_attr":
                owner, _, name = str(node.target).rpartition(".")
                yield self.net.get_submodule(owner), name

    def _modules_read(self, nodes: list[fx.Node]) -> Iterator[nn.Module]:
        for node in nodes:
            if node in self.called and self._is_recomputed(node):
                block = self.blocks.get(node)
                for m in (self.called[node],) if block is None else block.modules:
                    yield from m.modules()

    def attribute(self, node: fx.Node) -> Any:
        """Return the attribute of the network that a `get_attr` node reads."""
        return operator.attrgetter(str(node.target))(self.net)

    def is_pooled(self, node: fx.Node) -> bool:
        """Whether a node is a max pooling, which only selects values."""
        module = self.called.get(node)
        if module is None:
            return node.target is max_pool2d
        # Hooks and methods of subclasses may change the values.
        return type(module) in _MAX_POOLS and not has_hooks(module)

    def mixes(self, node: fx.Node) -> bool:
        """Whether a node is a norm outside a block that uses batch statistics."""
        module = self.called.get(node)
        known = type(module) in NORMS or isinstance(module, CollectiveNorm | FusedNorm)
        return isinstance(module, _BatchNorm) and known and by_batch(module)

    def _find_blocks(self) -> dict[fx.Node, BlockCall]:
        """Find the blocks by the node of their neuron, and make that node read their inputs."""
        blocks: dict[fx.Node, BlockCall] = {}
        calls = Counter(self.called.values())
        varying = _varying(self.graph)
        # In reverse: of two norms in a sum, the last one is the first of the block.
        for node in reversed(list(self.graph.nodes)):
            module = self.called.get(node)
            if isinstance(module, Block) and not has_hooks(module):
                inputs = _bound(node, NAMES)
                blocks[node] = BlockCall((module.norm,), module.neuron, inputs)
            elif isinstance(module, FusedNorm) and calls[module] == 1 and not has_hooks(module):
                self._join(node, module, calls, varying, blocks)
        for node in blocks:
            self.called.setdefault(node, self.net.get_submodule(str(node.target)))
        return blocks

    def _join(
        self,
        node: fx.Node,
        norm: FusedNorm,
        calls: Counter[nn.Module],
        varying: set[fx.Node],
        blocks: dict[fx.Node, BlockCall],
    ) -> None:
        """Fuse the norm at `node`, an optional sum with a residual, which may have a norm of its
        own, and the only neuron that reads the result."""
        last, residual, between = node, None, []
        while len(last.users) == 1:
            (user,) = last.users
            module = self.called.get(user)
            other = None if residual is not None else _added(user, last, varying)
            if other is not None:
                residual = other
            elif type(module) is not nn.Identity or has_hooks(module):
                break
            between.append(user)
            last = user
        user, neuron = next(iter(last.users), node), None
        if len(last.users) == 1 and user not in blocks:
            neuron = self.called.get(user)
        if (
            not isinstance(neuron, Neuron)
            or calls[neuron] != 1
            or has_hooks(neuron)
            or (user.args, user.kwargs) != ((last,), {})
            or (len(node.args), len(node.kwargs)) != (1, 0)
            or len(type(neuron).input_names) != 1
        ):
            return
        norms, inputs, removed = [norm], node.all_input_nodes, [*reversed(between), node]
        if residual is not None:
            module = self.called.get(residual)
            while (
                type(module) is nn.Identity and len(residual.users) == 1 and not has_hooks(module)
            ):
                removed.append(residual)
                (residual,) = residual.all_input_nodes
                module = self.called.get(residual)
            if (
                isinstance(module, FusedNorm)
                and (calls[module], len(residual.users)) == (1, 1)
                and (len(residual.args), len(residual.kwargs)) == (1, 0)
                and not has_hooks(module)
                and can_normalize_residual(norm, module)
            ):
                norms.append(module)
                removed.append(residual)
                (residual,) = residual.all_input_nodes
            inputs.append(residual)
        user.args = tuple(inputs)
        for old in removed:
            self.graph.erase_node(old)
            self.called.pop(old, None)
        blocks[user] = BlockCall(tuple(norms), neuron, tuple(inputs))

    def neuron(self, node: fx.Node) -> NeuronCall | None:
        """Return the call of a neuron at a node, or None."""
        module, block = self.called.get(node), self.blocks.get(node)
        if block is not None:
            neuron = block.neuron
            call = partial(scan, block.norms, neuron, None)
            return NeuronCall(call, len(type(neuron).states), block.modules, block.inputs)
        if not isinstance(module, Neuron) or not self._fires(node):
            return None
        if type(module).forward is not Neuron.forward:
            raise ValueError(
                f"memory=Checkpoint() can't run '{node.target}': {type(module).__name__} overrides "
                "forward; use another policy"
            )
        inputs = _bound(node, type(module).input_names)
        return NeuronCall(partial(scan_neuron, module), len(type(module).states), (module,), inputs)

    def _fires(self, node: fx.Node) -> bool:
        """Whether a node is a block or neuron that is recomputed; one with hooks runs once."""
        module = self.called.get(node)
        return node in self.blocks or (isinstance(module, Neuron) and not has_hooks(module))

    def _is_recomputed(self, node: fx.Node) -> bool:
        module = self.called.get(node)
        if module is not None and has_hooks(module):
            return False  # a hook may draw random numbers, or mix samples
        return self._fires(node) or self.mixes(node) or is_by_row(node, module)

    def _cut(self, nodes: list[fx.Node], varying: set[fx.Node]) -> Iterator[Segment]:
        once = {n for n in nodes if n is not self.input and not self._is_recomputed(n)}
        ends = {self.input, *self.outputs, *once, *filter(self._fires, nodes)}
        # The calls of one norm update its running statistics in the order of the network.
        calls = Counter(map(self.called.get, nodes))
        ends.update(n for n in nodes if self.mixes(n) and calls[self.called[n]] > 1)
        ends.update(i for n in once for i in n.all_input_nodes)
        # The target of the segment that contains a node.
        home: dict[fx.Node, fx.Node] = {}
        for node in reversed(nodes):
            homes = {home[user] for user in node.users if user in home}
            home[node] = homes.pop() if node not in ends and len(homes) == 1 else node
        segments: dict[fx.Node, list[fx.Node]] = {n: [] for n in nodes if home[n] is n}
        for node in nodes:
            segments[home[node]].append(node)
        del segments[self.input]
        reshaped: set[fx.Node] = set()  # saved values whose dim 0 may not be T*B
        for target, inner in segments.items():
            inputs = dict.fromkeys(i for n in inner for i in n.all_input_nodes)
            read = tuple(i for i in inputs if i in varying and i not in inner)
            recomputed = once.isdisjoint(inner)
            if not recomputed or not (self._fires(target) or reshaped.isdisjoint(read)):
                reshaped.add(target)
            by_sample = recomputed and reshaped.isdisjoint(read) and not any(map(self.mixes, inner))
            block = self.blocks.get(target)
            block = block if block is not None and by_batch(block.norms[0]) else None
            neuron = self.neuron(target) if block is None else None
            parameters = self._parameters(inner, varying)
            yield Segment(target, read, parameters, recomputed, by_sample, block, neuron)

    def _parameters(self, inner: list[fx.Node], varying: set[fx.Node]) -> tuple[nn.Parameter, ...]:
        """Return the parameters that nodes read through layers or attributes of the network."""
        parameters: dict[nn.Parameter, None] = {}
        left = list(inner)
        while left:
            node = left.pop()
            value = self.attribute(node) if node.op == "get_attr" else self.called.get(node)
            if node in self.blocks:
                norms = self.blocks[node].norms
                parameters |= {p: None for norm in norms for p in norm.parameters()}
            if isinstance(value, nn.Parameter):
                parameters[value] = None
            elif isinstance(value, nn.Module):
                parameters |= dict.fromkeys(value.parameters())
            left += [i for i in node.all_input_nodes if i not in varying]
        return tuple(parameters)


def _traced(net: nn.Module) -> fx.Graph:
    try:
        graph = trace(net)
    except Untraceable as error:
        raise ValueError(
            f"memory=Checkpoint() needs a network that torch.fx can trace as a whole: {error}; use "
            "another policy"
        ) from error
    if sum(node.op == "placeholder" for node in graph.nodes) != 1:
        raise ValueError("memory=Checkpoint() needs a network with one input: use another policy")
    return graph


def _all_parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter | None]:
    """What `parameters` gives, with repetitions, in a fraction of its time."""
    return [p for m in modules for p in m._parameters.values()]


def _are_same(objects: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(objects) == len(others) and all(map(operator.is_, objects, others))


def _modes(modules: Iterable[nn.Module]) -> list[tuple[bool, bool, bool, dict[str, Any]]]:
    return [
        (
            m.training,
            has_hooks(m),
            isinstance(m, _BatchNorm) and by_batch(m),
            {} if is_leaf(m) else _constants(m),
        )
        for m in modules
    ]


def _constants(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in vars(module).items() if isinstance(v, int | float | str | None)}


def _check_norms(net: nn.Module, has_blocks: bool) -> None:
    norms = [m for m in net.modules() if isinstance(m, _BatchNorm)]
    if norms and not has_blocks and not any(isinstance(m, FusedNorm) for m in norms):
        first = ", before shard_time" if any(isinstance(m, CollectiveNorm) for m in norms) else ""
        raise ValueError(
            f"memory=Checkpoint() needs a fused network: call spikefuse.fuse on it{first}"
        )


def _varying(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that depend on the input."""
    varying: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or not varying.isdisjoint(node.all_input_nodes):
            varying.add(node)
    return varying - {node}  # without the output node


def _bound(node: fx.Node, names: tuple[str, ...]) -> tuple[fx.Node, ...]:
    """Return the inputs of a call of a neuron or block, in the order of `names`."""
    inputs = dict(zip(names, node.args, strict=False)) | node.kwargs
    inputs = {name: x for name, x in inputs.items() if x is not None}
    tensors = all(isinstance(x, fx.Node) for x in inputs.values())
    if len(node.args) > len(names) or not tensors or list(inputs.keys() - set(names)):
        raise ValueError(
            f"memory=Checkpoint() can't run '{node.target}', which is called with more than its "
            f"inputs ({', '.join(names)}): use another policy"
        )
    return tuple(x for name in names if isinstance(x := inputs.get(name), fx.Node))


def _added(add: fx.Node, node: fx.Node, varying: set[fx.Node]) -> fx.Node | None:
    """Return the other operand if `add` is a plain sum of `node` and another activation."""
    if add.target not in _ADDS or len(add.args) != 2 or add.kwargs not in ({}, {"alpha": 1}):
        return None
    first, second = add.args
    if add.target == "add_" and first is not node:
        return None
    other = second if first is node else first
    is_sum = isinstance(other, fx.Node) and other is not node and other in varying
    return other if is_sum else None  # type: ignore[return-value]
