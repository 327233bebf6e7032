"""Any torch network with pointwise activations as a spiking one."""

from __future__ import annotations

import copy as copying
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from spikefuse.nn.activations import ACTIVATIONS, FUNCTIONS, METHODS
from spikefuse.nn.call import active
from spikefuse.nn.neuron import Neuron
from spikefuse.nn.temporal import Temporal
from spikefuse.nn.tracing import Untraceable, trace_modes

MakeNeuron = Callable[[], Neuron]


def spiking(
    model: nn.Module,
    neuron: MakeNeuron,
    replace: tuple[type[nn.Module], ...] = ACTIVATIONS,
    copy: bool = True,
) -> nn.Module:
    """`model` with a new neuron in place of each pointwise activation, for `Temporal` to run.

    An activation is a module of `replace`, or a call of a function or tensor method that does the
    same (`F.relu`, `torch.relu`, `x.relu()`). A module that is called at several places gets a
    neuron at each, and the first has its name. All other layers keep their names, so a state dict
    of `model` loads, less what activations such as nn.PReLU had in it.

    The model is traced with torch.fx. Where each activation is a module called once, the result is
    the model with these modules exchanged; else an fx.GraphModule, which does what the model's
    `forward` did, in training and evaluation alike. What layers of torch.nn compute inside, such as
    nn.LSTM and nn.TransformerEncoderLayer, stays as it is.

    Args:
        neuron: makes one neuron per call, such as `lambda: spikefuse.LIF(decay=0.5)`.
        replace: which activations, by their modules; the rest stay. Leave out nn.Sigmoid and
            nn.Tanh where they are gates.
        copy: False: the result is made of the model's own layers, and the model is used up.

    Warns:
        UserWarning: torch.fx cannot trace the model, or traces it differently in training and in
            evaluation. Then only modules are exchanged, not calls of functions, and a call that
            reaches one neuron twice in a time step raises a ValueError.

    Raises:
        TypeError: `model` is not a module, or `neuron` does not make neurons.
        ValueError: the model has no activation; `model` is a Temporal.
    """
    _check(model, neuron)
    model = copying.deepcopy(model) if copy else model
    make = functools.partial(_new, neuron, set())
    try:
        graph = trace_modes(model)
    except Untraceable as error:
        return _exchanged(model, make, replace, error)
    sites = [_Site(node, *found) for node, found in _activations(model, graph, replace)]
    if not sites:
        raise ValueError(
            "the model has no activation to replace: expected modules such as nn.ReLU, or calls "
            "such as F.relu"
        )
    modules = {id(site.module) for site in sites}
    if len(modules) == len(sites) and all(site.is_plain for site in sites):
        for site in sites:
            _set(model, site.name, make())
        return model
    return _rewritten(model, graph, sites, make)


@dataclass(frozen=True)
class _Site:
    """A place where an activation is called."""

    node: fx.Node
    name: str  # for the neuron
    module: nn.Module | None

    @property
    def in_place(self) -> bool:
        node = self.node
        inplace = node.kwargs.get("inplace", False) or getattr(self.module, "inplace", False)
        name = node.target if isinstance(node.target, str) else node.target.__name__
        return bool(inplace) or (self.module is None and name.endswith("_"))

    def later_users(self) -> list[fx.Node]:
        """Who reads the input after an activation in place: they mean its output."""
        return [n for n in _input(self.node).users if n > self.node] if self.in_place else []

    @property
    def is_plain(self) -> bool:
        return self.module is not None and not self.later_users()


def _input(node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0]


def _check(model: nn.Module, neuron: MakeNeuron) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: expected a torch.nn.Module")
    if any(isinstance(m, Temporal) for m in model.modules()):
        raise ValueError("the model has a Temporal in it: convert the network, then wrap it")
    if isinstance(neuron, nn.Module) or not callable(neuron):
        raise TypeError(
            f"neuron is a {type(neuron).__name__}: expected a function that makes a new one at "
            "each call, such as lambda: spikefuse.LIF()"
        )


def _new(neuron: MakeNeuron, made: set[Neuron]) -> Neuron:
    found = neuron()
    if not isinstance(found, Neuron):
        raise TypeError(f"neuron makes a {type(found).__name__}: expected a spikefuse.Neuron")
    if found in made:
        raise ValueError("neuron makes the same module again: expected a new one at each call")
    made.add(found)
    return found


def _activations(
    model: nn.Module, graph: fx.Graph, replace: tuple[type[nn.Module], ...]
) -> Iterator[tuple[fx.Node, tuple[str, nn.Module | None]]]:
    """The calls of activations on what depends on the input, and a name for each."""
    dependent: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(n in dependent for n in node.all_input_nodes):
            dependent.add(node)
        if node not in dependent:
            continue  # such as the sigmoid of a parameter
        if node.op == "call_module":
            module = model.get_submodule(node.target)
            if isinstance(module, replace):
                yield node, (node.target, module)
        elif node.op in ("call_function", "call_method"):
            table: Mapping[Any, type[nn.Module]]
            table = FUNCTIONS if node.op == "call_function" else METHODS
            kind = table.get(node.target)
            if kind is not None and issubclass(kind, replace):
                stack = list(node.meta.get("nn_module_stack", {}).values())
                where = stack[-1][0] if stack else ""
                yield node, (f"{where}.neuron" if where else "neuron", None)


def _rewritten(
    model: nn.Module, graph: fx.Graph, sites: list[_Site], make: Callable[[], Neuron]
) -> fx.GraphModule:
    """The model as its graph, with a neuron at every site."""
    dropped = {site.name for site in sites if site.module is not None}
    kept = [
        (name, tensor)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if name.rpartition(".")[0] not in dropped
    ]
    taken = {name for name, _ in (*model.named_modules(), *kept)} - dropped
    for site in sites:
        name = _free(site.name, taken)
        taken.add(name)
        _set(model, name, make())
        with graph.inserting_after(site.node):
            neuron = graph.call_module(name, (_input(site.node),))
        for user in site.later_users():
            if user is not neuron:
                user.replace_input_with(_input(site.node), neuron)
        site.node.replace_all_uses_with(neuron)
        graph.erase_node(site.node)
    result = fx.GraphModule(model, graph, type(model).__name__)
    _complete(result, model, kept)
    return result


def _complete(result: nn.Module, model: nn.Module, kept: list[tuple[str, Tensor]]) -> None:
    """Give `result` what the graph doesn't use, so that a state dict loads, and the modes."""
    for name, tensor in kept:
        path, _, last = name.rpartition(".")
        if path not in dict(result.named_modules()):
            assert isinstance(result, fx.GraphModule)
            result.add_submodule(path, nn.Module())
        owner = result.get_submodule(path)
        if hasattr(owner, last):
            continue
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(last, tensor)
        else:
            temporary = last in model.get_submodule(path)._non_persistent_buffers_set
            owner.register_buffer(last, tensor, persistent=not temporary)
    modes = {name: m.training for name, m in model.named_modules()}
    for name, module in result.named_modules():
        module.training = modes.get(name, model.training)


def _free(name: str, taken: set[str]) -> str:
    """The name, with a number after it if it is taken."""
    found, number = name, 0
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    return found


def _set(model: nn.Module, name: str, neuron: Neuron) -> None:
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, neuron.train(model.training))


def _exchanged(
    model: nn.Module,
    make: Callable[[], Neuron],
    replace: tuple[type[nn.Module], ...],
    reason: Untraceable,
) -> nn.Module:
    """The model with its activation modules exchanged, wherever they are called."""
    found = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, replace)
    ]
    if not found:
        raise ValueError(
            f"torch.fx cannot trace the model ({reason}), and it has no activation modules to "
            "replace: write its activations as modules, such as nn.ReLU"
        )
    warnings.warn(
        f"torch.fx cannot trace the model ({reason}): its activation modules are replaced, but "
        "calls of functions such as F.relu, if it has any, are not",
        stacklevel=3,
    )
    for parent, name in found:
        neuron = make().train(model.training)
        neuron.register_forward_pre_hook(_once)
        setattr(parent, name, neuron)
    return model


def _once(neuron: nn.Module, args: Any) -> None:
    call = active.call
    name = None if call is None else call.names.get(id(neuron))
    if call is not None and name in call.finals:
        raise ValueError(
            f"neuron '{name}' replaces an activation that is called twice in one step, and "
            "torch.fx could not tell the calls apart: use one module per call"
        )
