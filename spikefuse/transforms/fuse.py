"""Batch norms of a model fused with the neurons after them, and max pooling by our kernels."""

from __future__ import annotations

import copy
import operator
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from spikefuse.block.batch_norm import NORMS
from spikefuse.block.block import Block, normed
from spikefuse.nn.neuron import Neuron
from spikefuse.nn.pool import MaxPool2d, max_pool2d
from spikefuse.nn.temporal import Temporal
from spikefuse.nn.tracing import works_in_place
from spikefuse.transforms.fusion import Fusion, Place
from spikefuse.transforms.rewrite import divide, has_hooks, is_compiled, rebuilt

ADDS = (operator.add, torch.add, "add", "add_")


@overload
def fuse(model: Temporal) -> Temporal: ...
@overload
def fuse(model: nn.Module) -> nn.Module: ...
def fuse(model: nn.Module) -> nn.Module:
    """`model` with norm → neuron, and norm → add → neuron, computed as one.

    The model is traced with torch.fx, so it does not matter how it is written. A pair is fused if
    the neuron, or a sum that only the neuron reads, is the only reader of the norm, and each is
    called once; nn.Identity may stand between. `spikefuse.nn.MaxPool2d` takes the place of each
    nn.MaxPool2d, and its function that of `F.max_pool2d`. The result is a new model of the same
    layers, under the same names: parameters and buffers are shared with `model`, an optimizer made
    before goes on, and state dicts load both ways. `model` can be used as before.

    Where something is fused, the result is an fx.GraphModule in place of the largest module around
    it that can be traced, up to the network that a Temporal runs. It does what `forward` did when
    it was traced, in training and evaluation alike; norms and neurons are looked up by name at each
    call. Their own `forward` is not called: hooks put on a fused norm or neuron later do not run.
    In a model that has a Temporal, only what the Temporal runs is fused or replaced.

    Returns:
        The fused model, or `model` itself if there is nothing to fuse. Its attribute `fusion` says
        what was fused and what was not, and why: see `spikefuse.transforms.fusion.Fusion`.

    Warns:
        UserWarning: the model has batch norms and neurons, but none of them could be fused.

    Raises:
        TypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: expected a torch.nn.Module")
    names = {module: name for name, module in model.named_modules()}
    nets = _networks(model)
    graphs: dict[nn.Module, fx.Graph] = {}
    closed: dict[nn.Module, str] = {}
    for net in nets:
        found, reasons = divide(net)
        graphs |= found
        closed |= reasons
    calls = Counter(
        part.get_submodule(str(node.target))
        for part, graph in graphs.items()
        for node in graph.nodes
        if node.op == "call_module"
    )
    parts = [_Part(part, graph, names[part], calls) for part, graph in graphs.items()]
    as_they_are = {m for module in closed for m in module.modules()}
    for part in parts:
        # A module around parts that is called as it is gets copied for norms, not for pools alone.
        if part.fuse() or part.module not in as_they_are:
            part.replace_pools()
    changed = {part.module: part.graph for part in parts if part.changed}
    pools: dict[nn.Module, nn.Module] = {p: _ours(p) for part in parts for p in part.pools}
    left = [m for m in closed if is_compiled(m) or changed.keys().isdisjoint(m.modules())]
    result = rebuilt(model, changed, pools, left)
    places = [place for part in parts for place in part.places()]
    num_pools = len(pools) + sum(part.num_functions for part in parts)
    fusion = Fusion(_places(places, names, nets, closed), num_pools)
    result.__dict__["fusion"] = fusion
    if not fusion.fused and _both(fusion):
        reasons_given = "; ".join(sorted({str(place.reason) for place in fusion.left}))
        warnings.warn(f"nothing was fused: {reasons_given}", stacklevel=2)
    return result


def _networks(model: nn.Module) -> list[nn.Module]:
    """What is fused inside: the networks of its containers, but for what torch.compile gave, or the
    model itself if there is no container."""
    containers = [m for m in model.modules() if isinstance(m, Temporal)]
    if is_compiled(model) or not containers:
        return [model]
    compiled = {m for outer in model.modules() if is_compiled(outer) for m in outer.modules()}
    return [m.net for m in containers if m not in compiled]


def _ours(pool: nn.MaxPool2d) -> MaxPool2d:
    """The same max pooling, with hooks of its own from now on, of our class."""
    ours = MaxPool2d.__new__(MaxPool2d)
    for name, value in vars(pool).items():
        ours.__dict__[name] = copy.copy(value) if isinstance(value, dict) else value
    return ours


def _both(fusion: Fusion) -> bool:
    return any(p.norm for p in fusion.places) and any(p.neuron for p in fusion.places)


class _Part:
    """A part of the model as a graph, and what is found in it.

    Args:
        module: the part.
        graph: which `fuse` changes.
        name: of the part in the model.
        calls: how often each module of the model is called in all graphs.

    Attributes:
        changed: whether the graph is another one now.
        pools: max poolings that it calls, for others to take their places.
        num_functions: of max pooling that were replaced.
    """

    def __init__(
        self, module: nn.Module, graph: fx.Graph, name: str, calls: Counter[nn.Module]
    ) -> None:
        self.module, self.graph, self.name, self.calls = module, graph, name, calls
        self.left: list[Place] = []
        self.pools: list[nn.MaxPool2d] = []
        self.num_functions = 0
        self.changed = False

    def fuse(self) -> bool:
        """Rewrite the graph; whether there was anything to fuse."""
        # From the end, so that of two norms in a sum the later one is taken.
        for node in reversed(list(self.graph.nodes)):
            if isinstance(self.called(node), _BatchNorm):
                match = _Match(self, node)
                if match.reason is None:
                    match.rewrite()
                    self.changed = True
                else:
                    self.left.append(match.place())
        return self.changed

    def replace_pools(self) -> None:
        """Put our function in the place of PyTorch's, and find the modules."""
        for node in self.graph.nodes:
            module = self.called(node)
            if type(module) is nn.MaxPool2d:
                self.pools.append(module)
            elif node.target is F.max_pool2d and not node.kwargs["return_indices"]:
                node.target = max_pool2d
                node.kwargs = {k: v for k, v in node.kwargs.items() if k != "return_indices"}
                self.num_functions += 1
                self.changed = True

    def places(self) -> Iterator[Place]:
        """What is fused now, and what is not."""
        paired = {place.neuron for place in self.left}
        for node in self.graph.nodes:
            if node.target is normed:
                norm, neuron, _, *rest = node.args
                residual = self.described(rest[0]) if rest else None
                yield Place(self.full(norm.target), self.full(neuron.target), residual)
            elif isinstance(self.called(node), Neuron) and self.full(node.target) not in paired:
                inputs = " and ".join(self.described(n) for n in node.all_input_nodes)
                reason = f"it reads {inputs}, which is no batch norm"
                yield Place(None, self.full(node.target), None, reason)
        yield from self.left

    def called(self, node: fx.Node) -> nn.Module | None:
        return self.module.get_submodule(str(node.target)) if node.op == "call_module" else None

    def full(self, target: Any) -> str:
        """The name in the model of what has a name in the part."""
        return f"{self.name}.{target}" if self.name else str(target)

    def described(self, node: fx.Node) -> str:
        if node.target is normed:
            return self.full(node.args[1].target)  # type: ignore[union-attr]
        if node.op in ("call_module", "get_attr"):
            return self.full(node.target)
        if node.op in ("placeholder", "output"):
            return "the input" if node.op == "placeholder" else "the output"
        return getattr(node.target, "__name__", str(node.target))


class _Match:
    """A norm and what its output goes through, up to a neuron.

    Attributes:
        reason: why norm and neuron can't be fused, or None.
    """

    def __init__(self, part: _Part, norm: fx.Node) -> None:
        self.part, self.norm = part, norm
        self.neuron: fx.Node | None = None
        self.residual: fx.Node | None = None
        self.between: list[fx.Node] = []
        self.reason = self._reason()

    def _reason(self) -> str | None:
        last = self._walk()
        if len(last.users) != 1:
            what = "it" if self.residual is None else "the sum"
            return f"{what} is read at {len(last.users)} places"
        (user,) = last.users
        if user.target is normed:
            return f"it is added before '{self.part.described(user)}'"
        if not isinstance(self.part.called(user), Neuron):
            return f"it goes to {self.part.described(user)}, not to a neuron"
        self.neuron = user
        return self._wrong_norm() or self._wrong_neuron(last) or self._written_between()

    def _walk(self) -> fx.Node:
        """Through identities and one sum; the last of them."""
        node = self.norm
        while len(node.users) == 1:
            (user,) = node.users
            module = self.part.called(user)
            if self.residual is None and _other(user, node) is not None:
                self.residual = _other(user, node)
            elif type(module) is not nn.Identity or has_hooks(module):
                break
            self.between.append(user)
            node = user
        return node

    def _wrong_norm(self) -> str | None:
        module = self.part.called(self.norm)
        assert module is not None
        if type(module) not in NORMS:
            return f"{type(module).__name__} may compute something else than batch norm"
        return self._wrong_call("the norm", self.norm, module)

    def _wrong_neuron(self, last: fx.Node) -> str | None:
        assert self.neuron is not None
        module = self.part.called(self.neuron)
        assert module is not None
        if type(module).forward is not Neuron.forward:
            return f"{type(module).__name__} has a forward of its own"
        if self.neuron.args != (last,):
            return "the neuron has further inputs"
        return self._wrong_call("the neuron", self.neuron, module)

    def _wrong_call(self, what: str, node: fx.Node, module: nn.Module) -> str | None:
        if has_hooks(module):
            return f"{what} has hooks"
        if self.part.calls[module] != 1:
            return f"{what} is called {self.part.calls[module]} times"
        if len(node.args) != 1 or node.kwargs:
            return f"{what} is called with more than its input"
        return None

    def _written_between(self) -> str | None:
        """The block reads at the neuron what the norm has read, which must still be the same."""
        node = self.norm.next
        while node is not self.neuron:
            if node not in self.between and works_in_place(node, self.part.called(node)):
                return f"{self.part.described(node)} works in place between the two"
            node = node.next
        return None

    def place(self) -> Place:
        full = self.part.full
        neuron = None if self.neuron is None else full(self.neuron.target)
        return Place(full(self.norm.target), neuron, None, self.reason)

    def rewrite(self) -> None:
        graph, neuron = self.part.graph, self.neuron
        assert neuron is not None
        with graph.inserting_before(neuron):
            modules = tuple(
                graph.create_node("get_attr", node.target) for node in (self.norm, neuron)
            )
            tensors = (self.norm.args[0], *([] if self.residual is None else [self.residual]))
            block = graph.call_function(normed, (*modules, *tensors))
        neuron.replace_all_uses_with(block)
        for node in (neuron, *reversed(self.between), self.norm):
            graph.erase_node(node)


def _other(add: fx.Node, node: fx.Node) -> fx.Node | None:
    """What `add` adds to `node`, if it is a sum of two tensors and changes no other one."""
    if add.op not in ("call_function", "call_method") or add.target not in ADDS:
        return None
    if len(add.args) != 2 or add.kwargs not in ({}, {"alpha": 1}):
        return None
    first, second = add.args
    if add.target == "add_" and first is not node:
        return None
    other = second if first is node else first
    # A parameter is broadcast over the batch.
    if not isinstance(other, fx.Node) or other is node or other.op == "get_attr":
        return None
    return other


def _places(
    places: list[Place],
    names: dict[nn.Module, str],
    nets: list[nn.Module],
    closed: dict[nn.Module, str],
) -> tuple[Place, ...]:
    """The places, and what no graph has come to, in the model's order."""
    seen = {name for place in places for name in (place.norm, place.neuron)}
    blocks = {m for block in names if isinstance(block, Block) for m in block.modules()}
    inside = {m for net in nets for m in net.modules()}
    reasons = {names[module]: reason for module, reason in closed.items()}
    for module, name in names.items():
        if not isinstance(module, Neuron | _BatchNorm) or name in seen or module in blocks:
            continue
        reason = "it is outside Temporal" if module not in inside else _around(name, reasons)
        norm, neuron = (None, name) if isinstance(module, Neuron) else (name, None)
        places.append(Place(norm, neuron, None, reason))
    order = list(names.values())
    places.sort(key=lambda place: order.index(place.neuron or place.norm or ""))
    return tuple(places)


def _around(name: str, reasons: dict[str, str]) -> str:
    """Why the module around a layer is not part of a graph."""
    while name:
        name = name.rpartition(".")[0]
        if name in reasons:
            return f"'{name}' around it: {reasons[name]}" if name else reasons[name]
    return "it is not called"
