"""A network as a graph of the Neuromorphic Intermediate Representation (NIR)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import add, iadd
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from spikefuse._torch import user_hooks
from spikefuse.block.block import Block
from spikefuse.events.linear import EventLinear
from spikefuse.kernels.norm import BatchNorm
from spikefuse.neurons.checks import check_tensor
from spikefuse.neurons.definition import Neuron
from spikefuse.neurons.surrogate import Surrogate
from spikefuse.nn.delay import Delay
from spikefuse.nn.feedback import Feedback
from spikefuse.nn.neuron import check_module
from spikefuse.nn.recurrent import Recurrent
from spikefuse.nn.symbolic import is_leaf
from spikefuse.nn.temporal import Temporal
from spikefuse.transforms.converters.common import Refusal
from spikefuse.transforms.copies import copied
from spikefuse.transforms.nir_layers import Scale, Threshold, check_dt, package
from spikefuse.transforms.nir_neurons import fired_above, has_time, neuron_node, per_neuron

Layer = Neuron | Recurrent | Feedback
Sources = tuple[str, ...]  # the nodes whose outputs are added

_ADDITIONS = (add, iadd, torch.add)
_NO_HOOKS = "which a graph does not hold: remove them, or write what they change as layers"
_IGNORED = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_REASONS: dict[Any, str] = {
    nn.MaxPool2d: "NIR has no max pooling: train with nn.AvgPool2d, or a convolution with a stride",
    nn.AvgPool1d: "NIR has no pooling over one dim: use a convolution with a stride",
    BatchNorm: "only a batch norm that alone reads a convolution or linear layer can be folded "
    "into it: put it there",
}


def to_nir(net: nn.Module, sample: Tensor, *, dt: float) -> Any:
    """Return a network as a graph of the package nir, `nir.NIRGraph`.

    NIR describes neurons by differential equations. A graph of `to_nir(net, x, dt=dt)` gives the
    spikes of `net` if it is run by Euler's method with time steps of `dt`, from rest, where
    synapses are updated before membranes::

        tau dv/dt = v_leak - v + r x:   decay = 1 - dt / tau,   input factor = r dt / tau

    NIR fires above the threshold and we at it, so that thresholds are written as the next smaller
    float32, unless a neuron already fires above it. Batch norms are folded into the convolution or
    linear layer before them, with their running statistics; dropout is left out. The delays of a
    `Delay` are rounded to steps. `Recurrent` and `Feedback` become cycles. Weights keep their
    dtype, those of `sf.quantize` are written as rounded, and neurons have one float64 value each.
    `nir.write(path, graph)` saves the graph.

    Example::

        net = sf.Temporal(nn.Sequential(nn.Linear(784, 10), sf.LIF(decay=0.9)))
        graph = sf.to_nir(net, torch.rand(8, 1, 784), dt=1e-4)

    Args:
        net: a `Temporal`, or the network in one; its mode does not matter.
        sample: an input `[T, B, ...]` of the network (`[B, T, ...]` if that is its order), for the
            shapes.
        dt: duration of a time step, in the unit of the graph's time constants; other libraries use
            seconds, most of them 1e-4 by default.

    Raises:
        ModuleNotFoundError: nir is not installed.
        TypeError: an argument has the wrong type.
        ValueError: `dt` is not positive, or a part of the network has no equivalent in NIR: soft
            resets, max pooling, and neurons other than `IF`, `LIF`, `PLIF`, `CubaLIF`, `LI` and
            `DelayedResetLIF` with a hard reset; values per step; hooks. The error lists all of
            them.

    Source: Pedersen et al., "Neuromorphic intermediate representation: A unified instruction set
    for interoperable brain-inspired computing", Nature Communications 15, 2024.
    """
    nir, dt = package(), check_dt(dt)
    check_module("net", net)
    check_tensor("sample", sample, " [T, B, ...]")
    for name, module in net.named_modules():
        if isinstance(module, EventLinear):
            raise ValueError(
                f"'{name}' is an EventLinear, whose lists of events can't be traced: use "
                "nn.Linear, into which its state dict loads, and the neuron"
            )
        if isinstance(module, Temporal) and module is not net:
            raise ValueError(f"'{name}' is a Temporal inside the network: pass that alone")
    temporal = net if isinstance(net, Temporal) else Temporal(net)
    if user_hooks(temporal) or user_hooks(temporal.net):
        raise ValueError(f"the network has hooks, {_NO_HOOKS}")
    graph = _traced(copied(temporal.net).eval())
    run = Temporal(_ShapeRecorder(graph))
    with torch.no_grad():
        x = sample.transpose(0, 1) if temporal.batch_first else sample
        run(x[:1].clone(), impl="reference")
    writer = _Writer(nir, dt)
    writer.write(graph, list(x.shape[2:]))
    if writer.refused:
        lines = "".join(f"\n- {line}" for line in writer.refused)
        raise ValueError(f"the network has no equivalent in NIR:{lines}")
    # Its inference of types takes kernels for squares, and channels for those of a group.
    return nir.NIRGraph(writer.nodes, writer.edges, metadata={}, type_check=False)


class _NetworkTracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_ours = isinstance(m, Surrogate) or is_leaf(m)
        return is_ours or super().is_leaf_module(m, module_qualified_name)


def _traced(net: nn.Module) -> fx.GraphModule:
    if _NetworkTracer().is_leaf_module(net, ""):
        net = nn.Sequential(net)
    try:
        return fx.GraphModule(net, _NetworkTracer().trace(net))
    except (fx.proxy.TraceError, TypeError) as error:
        raise ValueError(
            f"the code of {type(net).__name__} can't be traced by torch.fx ({error}): write its "
            "forward without conditions on tensors or their shapes"
        ) from error


class _ShapeRecorder(nn.Module):
    """Runs a traced network and records the shape `[...]` of a step of each output in its graph."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, x: Tensor) -> Any:
        return _Shapes(self.graph).run(x)


class _Shapes(fx.Interpreter):
    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        values = module.values().values() if isinstance(module, Neuron) else ()
        if any(has_time(value, args[0].shape[1:]) for value in values):
            return args[0]  # it does not fit one step
        return super().call_module(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        n.meta["shape"] = list(result.shape[1:]) if isinstance(result, Tensor) else None
        return result


class _Writer:
    """The nodes and edges of a graph, and what has none."""

    def __init__(self, nir: ModuleType, dt: float) -> None:
        self.nir, self.dt = nir, dt
        self.nodes: dict[str, Any] = {}
        self.edges: list[tuple[str, str]] = []
        self.refused: list[str] = []
        self.neurons: set[nn.Module] = set()

    def write(self, graph: fx.GraphModule, shape: list[int]) -> None:
        source = self.add("input", self.nir.Input({"input": np.array(shape)}), ())
        sources, shape = self.walk(graph, source, "")
        try:
            self.add("output", self.nir.Output({"output": np.array(shape)}), sources)
        except Refusal as refusal:
            self.refused.append(f"the output: {refusal}")

    def walk(self, graph: fx.GraphModule, inputs: Sources, prefix: str) -> tuple[Sources, Any]:
        """Write a traced network that reads `inputs`; return what makes its output, and the
        output's shape."""
        found: dict[fx.Node, Sources] = {}
        result: tuple[Sources, Any] = (), []
        for node in graph.graph.nodes:
            if node.op == "placeholder" and not found:
                found[node] = inputs
            elif node.op == "output":
                (value,) = node.args
                if isinstance(value, fx.Node):
                    result = found[value], value.meta["shape"]
                else:
                    self.refused.append(
                        "the output: expected a single tensor; write a network for each output"
                    )
            else:
                try:
                    found[node] = self.node(graph, node, found, prefix)
                except Refusal as refusal:
                    self.refused.append(f"{_label(graph, node)}: {refusal}")
                    found[node] = ()
        return result

    def node(
        self, graph: fx.GraphModule, node: fx.Node, found: dict[fx.Node, Sources], prefix: str
    ) -> Sources:
        read = [arg for arg in node.args if isinstance(arg, fx.Node)]
        if node.op == "placeholder":
            raise Refusal("it is a second input: write a network for each input")
        if node.target in (*_ADDITIONS, "add", "add_") and len(read) == 2 == len(node.args):
            return self.sum(node, read, found)
        label = str(node.target if node.op == "call_module" else node.name)
        name = prefix + label.replace(".", "_")
        if node.target in (torch.flatten, "flatten") and len(read) == 1:
            dims = dict(zip(("start_dim", "end_dim"), node.args[1:], strict=False)) | node.kwargs
            flatten = nn.Flatten(dims.get("start_dim", 0), dims.get("end_dim", -1))  # type: ignore[arg-type]
            return self.layer(name, flatten, found[read[0]], (read[0], node))
        if node.op != "call_module":
            raise Refusal("expected calls of modules, additions and flatten: use a module for it")
        module = graph.get_submodule(str(node.target))
        if len(read) != len(node.args) or node.kwargs:
            raise Refusal("it is called with options: call it with its input alone")
        if any(map(user_hooks, module.modules())):
            raise Refusal(f"it has hooks, {_NO_HOOKS}")
        sources = [found[arg] for arg in read]
        if isinstance(module, Block):
            self.fold(graph, module.norm, read[0], sources[0])
            inputs = self.sum(node, read, found) if len(read) == 2 else sources[0]
            return self.neuron(name, module.neuron, inputs, node.meta["shape"])
        if len(read) != 1:
            raise Refusal(f"it is called with {len(read)} inputs: expected one")
        if isinstance(module, BatchNorm):
            self.fold(graph, module, read[0], sources[0])
            return sources[0]
        if isinstance(module, Neuron | Recurrent | Feedback):
            return self.neuron(name, module, sources[0], node.meta["shape"])
        return self.layer(name, module, sources[0], (read[0], node))

    def sum(self, node: fx.Node, read: list[fx.Node], found: dict[fx.Node, Sources]) -> Sources:
        first, second = read
        if node.kwargs:
            raise Refusal("it adds with a factor: scale one of the two by a layer")
        if first.meta["shape"] != second.meta["shape"]:
            shapes = f"{first.meta['shape']} and {second.meta['shape']}"
            raise Refusal(f"it adds steps of shapes {shapes}: expected the same shape")
        if node.target in (iadd, "add_") and len(first.users) > 1:
            raise Refusal("it changes a tensor that others read: write x + y")
        return found[first] + found[second]

    def add(self, name: str, node: Any, sources: Sources) -> Sources:
        """Add a node that reads the sum of `sources`."""
        count, unique = 1, name
        while unique in self.nodes:
            unique, count = f"{name}_{count}", count + 1
        self.nodes[unique] = node
        self.connect(sources, unique)
        return (unique,)

    def connect(self, sources: Sources, name: str) -> None:
        if len(set(sources)) < len(sources):
            raise Refusal("a tensor is added to itself, and NIR has one edge: use a factor of 2")
        self.edges += [(source, name) for source in sources]

    def layer(
        self, name: str, module: nn.Module, sources: Sources, ends: tuple[fx.Node, fx.Node]
    ) -> Sources:
        """Add a layer without states, which reads and gives what the nodes `ends` give."""
        if type(module) in _IGNORED:
            return sources
        before, after = (end.meta["shape"] for end in ends)
        make = LAYERS.get(type_before_parametrizations(module))
        if isinstance(module, Delay):
            node = self.nir.Delay(per_neuron("delay", module.delays(), before) * self.dt)
        elif make is None:
            reasons = (text for kind, text in _REASONS.items() if isinstance(module, kind))
            raise Refusal(next(reasons, "NIR has no equivalent of it: leave it out, or replace it"))
        else:
            node = make(self.nir, module, before)
        node.input_type = {"input": np.array(before)}
        node.output_type = {"output": np.array(after)}
        return self.add(name, node, sources)

    def fold(self, graph: fx.GraphModule, norm: BatchNorm, read: fx.Node, sources: Sources) -> None:
        """Fold a batch norm with its running statistics into the layer before it."""
        if not sources:  # it was refused
            return
        before = graph.get_submodule(str(read.target)) if read.op == "call_module" else None
        foldable = isinstance(before, nn.Linear | nn.Conv1d | nn.Conv2d) and len(read.users) == 1
        if not foldable or len(sources) != 1:
            raise Refusal(_REASONS[BatchNorm])
        if norm.running_mean is None or norm.running_var is None:
            raise Refusal("it has no running statistics: set track_running_stats=True")
        node = self.nodes[sources[0]]
        factor = 1 / (norm.running_var.double() + norm.eps).sqrt()
        shift = -norm.running_mean.double() * factor
        if norm.weight is not None:
            factor, shift = factor * norm.weight, shift * norm.weight
        if norm.bias is not None:
            shift = shift + norm.bias
        a, b = (_array(t.detach()) for t in (factor, shift))
        weight = node.weight.astype(np.float64) * a.reshape(-1, *(1,) * (node.weight.ndim - 1))
        bias = getattr(node, "bias", np.zeros(1)) * a + b
        dtype = node.weight.dtype
        if isinstance(before, nn.Linear):
            node = self.nir.Affine(weight.astype(dtype), bias.astype(dtype))
            self.nodes[sources[0]] = node
        else:
            node.weight, node.bias = weight.astype(dtype), bias.astype(dtype)

    def neuron(self, name: str, module: Layer, sources: Sources, shape: list[int]) -> Sources:
        if module in self.neurons:
            raise Refusal("it is called twice, with one state: use two modules")
        self.neurons.add(module)
        if isinstance(module, Recurrent | Feedback):
            return self.recurrent(name, module, sources, shape)
        return self.add(name, neuron_node(self.nir, module, self.dt, shape), sources)

    def recurrent(
        self, name: str, module: Recurrent | Feedback, sources: Sources, shape: list[int]
    ) -> Sources:
        node = neuron_node(self.nir, module.neuron, self.dt, shape)
        spikes = self.add(f"{name}.lif", node, sources)
        if isinstance(module, Recurrent):
            weight = torch.block_diag(*module.effective_weight((module.weight,)))
            sent = self.add(f"{name}.w_rec", _matrix(self.nir, weight, module.bias), spikes)
        else:
            body = _traced(module.body)
            _Shapes(body).run(torch.zeros(1, *shape, dtype=_dtype_of(module.body)))
            sent, returned = self.walk(body, spikes, f"{name}.")
            if returned != shape and sent:
                raise Refusal(f"its body returns {returned} for spikes {shape}")
        self.connect(sent, spikes[0])
        return spikes


def _label(graph: fx.GraphModule, node: fx.Node) -> str:
    if node.op == "call_module":
        return f"'{node.target}' ({type(graph.get_submodule(str(node.target))).__name__})"
    return f"'{node.name}' ({getattr(node.target, '__name__', node.target)})"


def _dtype_of(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters()), torch.get_default_dtype())


def _array(value: Tensor) -> np.ndarray:
    return value.detach().cpu().numpy()


# Layers without states: functions of the package, the module and the shape of its input.


def _linear(nir: ModuleType, module: Any, shape: list[int]) -> Any:
    if len(shape) != 1:
        raise Refusal(f"its input of one step has shape {shape}, and NIR's has one dim: flatten it")
    return _matrix(nir, module.weight, module.bias)


def _matrix(nir: ModuleType, weight: Tensor, bias: Tensor | None) -> Any:
    return nir.Linear(_array(weight)) if bias is None else nir.Affine(_array(weight), _array(bias))


def _conv(nir: ModuleType, module: Any, shape: list[int]) -> Any:
    if module.padding_mode != "zeros":
        raise Refusal(f"its padding_mode is {module.padding_mode!r}, and NIR pads with zeros")
    is_flat = isinstance(module, nn.Conv1d)
    options = {name: getattr(module, name) for name in ("stride", "padding", "dilation")}
    if is_flat:
        options = {n: v if isinstance(v, str) else v[0] for n, v in options.items()}
    weight = _array(module.weight)
    bias = np.zeros(len(weight), weight.dtype) if module.bias is None else _array(module.bias)
    kind, size = (nir.Conv1d, shape[1]) if is_flat else (nir.Conv2d, tuple(shape[1:]))
    return kind(size, weight, groups=module.groups, bias=bias, **options)


def _pool(nir: ModuleType, module: nn.AvgPool2d, shape: list[int]) -> Any:
    size, stride, padding = (
        np.broadcast_to(value, 2).copy()
        for value in (module.kernel_size, module.stride, module.padding)
    )
    if module.ceil_mode and ((shape[1:] + 2 * padding - size) % stride).any():
        raise Refusal("its ceil_mode counts windows beyond the edge: set ceil_mode=False")
    if padding.any() and not (module.count_include_pad or module.divisor_override):
        raise Refusal("it does not count the padding, and NIR does: set count_include_pad=True")
    divisor = module.divisor_override or size.prod()
    if divisor not in (1, size.prod()):
        raise Refusal(f"its divisor_override is {divisor}: NIR has averages and sums (1)")
    kind = nir.SumPool2d if divisor == 1 and size.prod() > 1 else nir.AvgPool2d
    return kind(size, stride, padding)


def _adaptive_pool(nir: ModuleType, module: nn.AdaptiveAvgPool2d, shape: list[int]) -> Any:
    given = module.output_size
    sizes = given if isinstance(given, tuple) else (given, given)
    target = [n if size is None else size for size, n in zip(sizes, shape[1:], strict=True)]
    if any(n % size for n, size in zip(shape[1:], target, strict=True)):
        raise Refusal(f"its windows overlap, as {shape[1:]} is not a multiple of {target}")
    size = np.array(shape[1:]) // np.array(target)
    return nir.AvgPool2d(size, size.copy(), np.zeros(2, int))


def _flatten(nir: ModuleType, module: nn.Flatten, shape: list[int]) -> Any:
    count = len(shape) + 1
    start, end = (dim % count for dim in (module.start_dim, module.end_dim))
    if start == 0:
        raise Refusal("it flattens time and batch: use start_dim=1")
    return nir.Flatten({"input": np.array(shape)}, start - 1, -1 if end == count - 1 else end - 1)


def _scale(nir: ModuleType, module: Scale, shape: list[int]) -> Any:
    return nir.Scale(np.broadcast_to(_array(module.scale), shape).copy())


def _threshold(nir: ModuleType, module: Threshold, shape: list[int]) -> Any:
    threshold = fired_above(_array(module.threshold), module.surrogate)
    return nir.Threshold(np.broadcast_to(threshold, shape).copy())


LAYERS: Mapping[type, Callable[[ModuleType, Any, list[int]], Any]] = {
    nn.Linear: _linear,
    nn.Conv1d: _conv,
    nn.Conv2d: _conv,
    nn.AvgPool2d: _pool,
    nn.AdaptiveAvgPool2d: _adaptive_pool,
    nn.Flatten: _flatten,
    Scale: _scale,
    Threshold: _threshold,
}
