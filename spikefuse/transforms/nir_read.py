"""A graph of the Neuromorphic Intermediate Representation (NIR) as a network."""

from __future__ import annotations

import copy
import graphlib
import keyword
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from spikefuse import isolated
from spikefuse.neurons import IF, LI, LIF, CubaLIF
from spikefuse.neurons.definition import Neuron
from spikefuse.neurons.surrogate import Surrogate, checked
from spikefuse.nn.delay import Delay
from spikefuse.nn.feedback import Feedback
from spikefuse.nn.recurrent import Recurrent
from spikefuse.transforms.converters.common import Above, Refusal
from spikefuse.transforms.converters.norse import SynapticLI
from spikefuse.transforms.nir_layers import Scale, Threshold, check_dt, package

Edges = list[tuple[str, str]]

#: Relative difference below which parameters stored in float32 count as equal.
ROUNDING = 1e-6

# Names that modules of a network can't have.
_RESERVED = (*dir(fx.GraphModule), *keyword.kwlist)


def from_nir(graph: Any, *, dt: float, surrogate: Surrogate | None = None) -> fx.GraphModule:
    """Return the network of a graph of the package nir, or of a file, to be run by `Temporal`.

    The differential equations of the neurons are solved by Euler's method with time steps of `dt`;
    synapses are updated before membranes::

        tau dv/dt = v_leak - v + r x:   decay = 1 - dt / tau,   input factor = r dt / tau

    Factors other than 1 and `1 - decay` become a `Scale` in front of the neuron. Neurons fire above
    their threshold, and potentials are counted from v_leak, at which they start; those of `IF` and
    `I` start at 0. Several edges to a node add up. A cycle of one neuron is a `Recurrent` if it
    consists of one matrix, else a `Feedback`: its spikes are fed back one time step later, and
    biases in it are added at every step. Graphs in the graph are flattened. Delays are `Delay`.

    The result computes one time step: `Temporal(from_nir(path, dt=1e-4))(x)` takes x `[T, B, ...]`.
    Its modules have the names of the nodes, with "_" for what Python does not allow. A file is read
    in a process of its own, with limits of time and memory. Weights have PyTorch's default dtype.

    Example::

        net = sf.Temporal(nn.Sequential(nn.Linear(784, 10), sf.LIF(decay=0.9)))
        graph = sf.to_nir(net, torch.rand(8, 1, 784), dt=1e-4)
        same = sf.Temporal(sf.from_nir(graph, dt=1e-4))  # or sf.from_nir("net.nir", dt=1e-4)

    Args:
        graph: a `nir.NIRGraph`, or the path of a file of `nir.write`.
        dt: duration of a time step, in the unit of the graph's time constants. The graph does not
            hold it; other libraries write graphs for steps of 1e-4 s by default, Norse of 1e-3 s.
        surrogate: gives the derivative of spikes; `Sigmoid(4.0)` by default.

    Raises:
        ModuleNotFoundError: nir is not installed.
        OSError: the file can't be read.
        TypeError: an argument has the wrong type.
        ValueError: `dt` is not positive, the file is damaged, or the graph has nodes or cycles
            without an equivalent: several inputs or outputs, delays that differ within a channel,
            time constants below `dt`, cycles through several neurons or a delay. The error lists
            all of them.

    Source: Pedersen et al., "Neuromorphic intermediate representation: A unified instruction set
    for interoperable brain-inspired computing", Nature Communications 15, 2024.
    """
    nir, dt, surrogate = package(), check_dt(dt), checked("surrogate", surrogate)
    source = "the graph"
    if isinstance(graph, str | os.PathLike):
        source, graph = f"the graph in {os.fspath(graph)}", _graph_in(graph)
    if not isinstance(graph, nir.NIRGraph):
        raise TypeError(f"graph is a {type(graph).__name__}: expected a nir.NIRGraph, or a path")
    return _Reader(dt, surrogate, source).read(graph)


def _graph_in(path: str | os.PathLike[str]) -> Any:
    program = Path(__file__).with_name("nir_file.py")
    content: dict[str, Any] = {}
    try:
        names, *arrays = isolated.arrays(program, "h5py", path)
        for name, array in zip(names.tolist(), arrays, strict=True):
            *groups, key = name.split("/")
            group = content
            for inner in groups:
                group = group.setdefault(inner, {})
            group[key] = array.item() if array.dtype.kind == "U" and not array.ndim else array[()]
        # The check of types refuses parameters with one value for all neurons.
        return package().dict2NIRNode({**content, "type_check": False})
    except OSError:
        raise
    except Exception as error:  # nir asserts, and looks up what may be missing
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ValueError(
            f"{path} is damaged, or not a file of nir.write ({kind}{error})"
        ) from error


@dataclass
class _LayerModule:
    """The module of a node, and for a neuron the factor of its input."""

    module: nn.Module
    factor: np.ndarray | None = None  # None for 1


class _Reader:
    """The layers of a graph, and what has none."""

    def __init__(self, dt: float, surrogate: Surrogate, source: str) -> None:
        self.dt, self.surrogate, self.source = dt, surrogate, source
        self.refused: list[str] = []
        self.layers: dict[str, _LayerModule] = {}

    def check(self) -> None:
        """Raise an error if something was refused."""
        if self.refused:
            lines = "".join(f"\n- {line}" for line in self.refused)
            raise ValueError(f"{self.source} has no equivalent network:{lines}")

    def read(self, graph: Any) -> fx.GraphModule:
        try:
            nodes, edges = _flattened(graph, "")
        except Refusal as refusal:
            nodes, edges = {}, []
            self.refused.append(str(refusal))
        self.check()
        unknown = {name for edge in edges for name in edge} - nodes.keys()
        if unknown:
            self.refused.append(f"edges name {sorted(unknown)}, which are not nodes")
        doubled = sorted({edge for edge in edges if edges.count(edge) > 1})
        if doubled:
            self.refused.append(f"edges {doubled} occur twice: remove one of each")
        ends = [[n for n, node in nodes.items() if _kind(node) == k] for k in ("Input", "Output")]
        for names, kind in zip(ends, ("inputs", "outputs"), strict=True):
            if len(names) != 1:
                self.refused.append(
                    f"{len(names)} {kind} {names}: expected one; read each path as a graph of its "
                    "own, and add or return the results in a module of yours"
                )
        for name, node in nodes.items():
            self.layer(name, node)
        self.check()
        reached = _reached(nodes, edges)
        lost = sorted(nodes.keys() - reached[ends[0][0]] - {ends[0][0]})
        if lost:
            self.refused.append(f"no edges lead from the input to {lost}: remove them")
        self.check()
        for members in _cycles(reached):
            try:
                edges = self.loop(members, edges)
            except (Refusal, ValueError) as refusal:
                self.refused.append(f"the cycle of {', '.join(members)}: {refusal}")
        self.check()
        modules: dict[str, nn.Module] = {}
        for name, layer in self.layers.items():
            if layer.factor is not None:
                scale = _unused(f"{name}_scale", nodes)
                edges = [(a, scale if b == name else b) for a, b in edges] + [(scale, name)]
                modules[scale] = Scale(_tensor(layer.factor))
            modules[name] = layer.module
        return _module(modules, edges, ends[0][0], ends[1][0])

    def layer(self, name: str, node: Any) -> None:
        kind = _kind(node)
        if kind in ("Input", "Output"):
            return
        surrogate = Above(copy.deepcopy(self.surrogate))
        try:
            if kind in IN_TIME:
                layer = IN_TIME[kind](_Parameters(node, self.dt, surrogate))
            elif kind == "Threshold":
                layer = _LayerModule(Threshold(_tensor(_array(node.threshold)), surrogate))
            elif kind in LAYERS:
                layer = _LayerModule(LAYERS[kind](node))
            else:
                raise Refusal("no equivalent of it is known")
            self.layers[name] = layer
        except Exception as error:  # the values of a node may be anything
            what = str(error) or type(error).__name__
            self.refused.append(f"'{name}' ({kind}): {what}")

    def loop(self, members: list[str], edges: Edges) -> Edges:
        """Turn a cycle of one neuron into a layer with its name; return the other edges."""
        neurons = [n for n in members if isinstance(self.layers[n].module, Neuron)]
        if len(neurons) != 1:
            raise Refusal(f"it has {len(neurons)} neurons: only a neuron's own spikes are fed back")
        (name,) = neurons
        neuron, body = self.layers[name], [n for n in members if n != name]
        inside = [edge for edge in edges if edge[0] in members and edge[1] in members]
        rest = [edge for edge in edges if edge not in inside]
        for a, b in rest:
            if a in body or b in body:
                raise Refusal(
                    f"the edge from '{a}' to '{b}' leaves or enters it beside its neuron '{name}'"
                )
        layers = {n: self.layers.pop(n).module for n in body}
        factor = neuron.factor
        only = next(iter(layers.values()), None)
        if len(layers) == 1 and isinstance(only, nn.Linear) and (name, name) not in inside:
            neuron.module = _recurrent(neuron.module, only, factor)
            return rest
        source, sink = _unused("spikes", layers), _unused("current", layers)
        inside = [(source if a == name else a, sink if b == name else b) for a, b in inside]
        returned: nn.Module = _module(layers, inside, source, sink)
        if factor is not None:
            returned = nn.Sequential(returned, Scale(_tensor(factor)))
        neuron.module = Feedback(returned, neuron.module)  # type: ignore[arg-type]
        return rest


def _recurrent(neuron: Any, linear: nn.Linear, factor: np.ndarray | None) -> Recurrent:
    if linear.in_features != linear.out_features:
        raise Refusal(f"its matrix is {list(linear.weight.shape)}: expected a square one")
    layer = Recurrent(neuron, linear.in_features, bias=linear.bias is not None)
    gain = torch.tensor(1.0) if factor is None else _tensor(factor)
    layer.weight = nn.Parameter(linear.weight.detach() * gain.reshape(-1, 1))
    if linear.bias is not None:
        layer.bias = nn.Parameter(linear.bias.detach() * gain)
    return layer


def _kind(node: Any) -> str:
    return type(node).__name__


def _flattened(graph: Any, prefix: str) -> tuple[dict[str, Any], Edges]:
    """Return the nodes and edges of a graph, with those of the graphs in it, by dotted names."""
    nodes: dict[str, Any] = {}
    edges = [(prefix + a, prefix + b) for a, b in graph.edges]
    for key, node in graph.nodes.items():
        name = prefix + key
        if _kind(node) != "NIRGraph":
            nodes[name] = node
            continue
        inner, inner_edges = _flattened(node, f"{name}.")
        into = {b for a, b in inner_edges if _kind(inner.get(a)) == "Input"}
        out = {a for a, b in inner_edges if _kind(inner.get(b)) == "Output"}
        ends = {n for n, other in inner.items() if _kind(other) in ("Input", "Output")}
        if len(ends) != 2 or not (into and out) or into & ends:
            raise Refusal(f"'{name}' (NIRGraph): expected one input, one output and nodes between")
        nodes |= {n: other for n, other in inner.items() if n not in ends}
        edges = [
            (a, b)
            for start, end in edges
            for a in (sorted(out) if start == name else [start])
            for b in (sorted(into) if end == name else [end])
        ]
        edges += [(a, b) for a, b in inner_edges if a not in ends and b not in ends]
    return nodes, edges


def _reached(nodes: Iterable[str], edges: Edges) -> dict[str, set[str]]:
    """Return the nodes that each node leads to."""
    after: dict[str, list[str]] = {name: [] for name in nodes}
    for a, b in edges:
        after[a].append(b)
    reached = {}
    for start in after:
        found: set[str] = set()
        left = [start]
        while left:
            new = set(after[left.pop()]) - found
            found |= new
            left += new
        reached[start] = found
    return reached


def _cycles(reached: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the sets of nodes that lead to each other."""
    groups: dict[frozenset[str], list[str]] = {}
    for name, found in reached.items():
        if name in found:
            groups.setdefault(frozenset(n for n in found if name in reached[n]), []).append(name)
    return list(groups.values())


def _unused(name: str, names: Iterable[str]) -> str:
    while name in names:
        name += "_"
    return name


def _module(
    modules: Mapping[str, nn.Module], edges: Edges, source: str, sink: str
) -> fx.GraphModule:
    """Return the module that computes `sink` from `source` along edges without a cycle."""
    before: dict[str, list[str]] = {name: [] for name in (source, *modules, sink)}
    for a, b in edges:
        before[b].append(a)
    graph, values = fx.Graph(), {}
    root: dict[str, nn.Module] = {}
    for name in graphlib.TopologicalSorter(before).static_order():
        if name == source:
            values[name] = graph.placeholder("x")
            continue
        read = [values[a] for a in before[name]]
        value = read[0]
        for other in read[1:]:
            value = graph.call_function(add, (value, other))
        if name == sink:
            result = value
            continue
        target = _unused(re.sub(r"\W", "_", name), (*root, *_RESERVED))
        root[target] = modules[name]
        values[name] = graph.call_module(target, (value,))
    graph.output(result)
    return fx.GraphModule(root, graph)


def _array(value: Any) -> np.ndarray:
    """Return a parameter, which may be a tensor (Norse writes those), in float64."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    return np.asarray(value, np.float64)


def _tensor(value: np.ndarray) -> Tensor:
    return torch.tensor(value, dtype=torch.get_default_dtype())


def _parameter(value: Any) -> nn.Parameter:
    return nn.Parameter(_tensor(_array(value)))


def _sizes(value: Any) -> Any:
    """Return a size, or several, as PyTorch takes them."""
    if isinstance(value, bytes | str):
        return value.decode() if isinstance(value, bytes) else value
    array = np.asarray(value)
    return int(array) if array.ndim == 0 else tuple(int(v) for v in array)


# Layers without states.


def _linear(node: Any) -> nn.Module:
    weight = _parameter(node.weight)
    if weight.ndim != 2:
        raise Refusal(f"its weight has {weight.ndim} dims: expected a matrix")
    rows, columns = weight.shape
    module = nn.Linear(columns, rows, bias=hasattr(node, "bias"), device="meta")
    module.weight = weight
    if hasattr(node, "bias"):
        module.bias = _parameter(node.bias)
    return module


def _conv(node: Any) -> nn.Module:
    weight, groups = _parameter(node.weight), _sizes(node.groups)
    kind = nn.Conv1d if weight.ndim == 3 else nn.Conv2d
    options = {name: _sizes(getattr(node, name)) for name in ("stride", "padding", "dilation")}
    channels = weight.shape[1] * groups, weight.shape[0]
    module = kind(*channels, tuple(weight.shape[2:]), groups=groups, device="meta", **options)  # type: ignore[arg-type]
    module.weight, module.bias = weight, _parameter(node.bias)
    return module


def _pool(node: Any) -> nn.Module:
    size, stride, padding = map(_sizes, (node.kernel_size, node.stride, node.padding))
    divisor = 1 if _kind(node) == "SumPool2d" else None
    return nn.AvgPool2d(size, stride, padding, divisor_override=divisor)


def _flatten(node: Any) -> nn.Module:
    """Dims of NIR are those of a sample, without the batch."""
    start, end = _sizes(node.start_dim), _sizes(node.end_dim)
    return nn.Flatten(start + (start >= 0), end + (end >= 0))


LAYERS: Mapping[str, Callable[[Any], nn.Module]] = {
    "Linear": _linear,
    "Affine": _linear,
    "Conv1d": _conv,
    "Conv2d": _conv,
    "AvgPool2d": _pool,
    "SumPool2d": _pool,
    "Flatten": _flatten,
    "Scale": lambda node: Scale(_tensor(_array(node.scale))),
}


# Neurons and delays.


class _Parameters:
    """The parameters of a node in float64, and what follows from them for time steps of `dt`."""

    def __init__(self, node: Any, dt: float, surrogate: Surrogate) -> None:
        self.node, self.dt, self.surrogate = node, dt, surrogate
        self.fires = hasattr(node, "v_threshold")

    def __getattr__(self, name: str) -> np.ndarray:
        value = _array(getattr(self.node, name))
        if not np.isfinite(value).all():
            raise Refusal(f"its {name} is not finite")
        return value

    def decay(self, name: str) -> np.ndarray:
        tau = getattr(self, name)
        if not (tau > 0).all() or (self.dt / tau > 1 + ROUNDING).any():
            raise Refusal(
                f"its {name} is {tau.min():g}, and a time step {self.dt:g}: expected time "
                "constants of at least dt, in the same unit"
            )
        return np.maximum(1 - self.dt / tau, 0)

    def firing(self) -> dict[str, Any]:
        """Return our options, for potentials counted from v_leak."""
        rest = self.v_leak if hasattr(self.node, "v_leak") else np.zeros(())
        return {
            "threshold": _value(self.v_threshold - rest),
            "v_reset": _value(self.v_reset - rest),
            "surrogate": self.surrogate,
        }

    def check_rest(self) -> None:
        if not self.fires and self.v_leak.any():
            raise Refusal("its v_leak is not 0, and its output is a potential: use v_leak=0")


def _value(array: np.ndarray) -> Any:
    """Return a parameter of a neuron: a number, one per channel, or one per neuron."""
    first = array.reshape(-1)[0]
    if (array == first).all():
        return float(first)
    channels = array.reshape(len(array), -1)
    is_per_channel = (channels == channels[:, :1]).all()
    return _tensor(channels[:, 0] if is_per_channel else array)


def _split(factor: np.ndarray, decay: np.ndarray) -> tuple[bool, np.ndarray | None]:
    """Return whether the neuron scales its input by `1 - decay`, and the factor before it."""
    if np.allclose(factor, 1, ROUNDING, 0):
        return False, None
    if np.allclose(factor, 1 - decay, ROUNDING, 0):
        return True, None
    first = factor.reshape(-1)[0]
    return False, np.array(first) if (factor == first).all() else factor


def _integrator(p: _Parameters) -> _LayerModule:
    _, factor = _split(p.r * p.dt, np.zeros(()))
    return _LayerModule(IF(**p.firing()) if p.fires else LI(1.0), factor)


def _leaky(p: _Parameters) -> _LayerModule:
    p.check_rest()
    decay = p.decay("tau")
    is_scaled, factor = _split(p.r * (1 - decay), decay)
    options = {"decay": _value(decay), "decay_input": is_scaled}
    return _LayerModule(LIF(**options, **p.firing()) if p.fires else LI(**options), factor)


def _current_based(p: _Parameters) -> _LayerModule:
    p.check_rest()
    decay, current_decay = p.decay("tau_mem"), p.decay("tau_syn")
    gain = p.w_in * (1 - current_decay) * p.r
    values = _value(current_decay), _value(decay)
    if not p.fires:
        return _LayerModule(SynapticLI(*values), _split(gain, np.zeros(()))[1])
    # Both factors act before the threshold, so that their product is what counts.
    is_scaled, factor = _split(gain * (1 - decay), decay)
    return _LayerModule(CubaLIF(*values, decay_input=is_scaled, **p.firing()), factor)


def _delay(p: _Parameters) -> _LayerModule:
    steps = torch.as_tensor(_value(p.delay / p.dt), dtype=torch.get_default_dtype())
    if steps.ndim > 1:
        raise Refusal("its delay differs within a channel: expected one value for each channel")
    steps = steps.reshape(-1)
    if (steps < 0).any():
        raise Refusal("its delay is negative")
    module = Delay(len(steps), max(1, math.ceil(steps.max())))
    module.delay = nn.Parameter(steps)
    return _LayerModule(module)


IN_TIME: Mapping[str, Callable[[_Parameters], _LayerModule]] = {
    **dict.fromkeys(("IF", "I"), _integrator),
    **dict.fromkeys(("LIF", "LI"), _leaky),
    **dict.fromkeys(("CubaLIF", "CubaLI"), _current_based),
    "Delay": _delay,
}
