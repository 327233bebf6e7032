"""The graph of a network with activations, and its rewriting into one with spikes."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval
from torch.nn.utils.parametrize import is_parametrized

from spikefuse._torch import hooks_of
from spikefuse.graph.nodes import name_of
from spikefuse.kernels.norm import BatchNorm
from spikefuse.nn.activations import FUNCTIONS, METHODS, QCFS, refuse_hooks
from spikefuse.nn.over_time import OnSequences

#: Names of functions and methods that are affine in all tensors that depend on the input, ...
AFFINE = {
    *("add", "sub", "neg", "mean", "sum", "to", "float", "clone", "contiguous", "dropout"),
    *("flatten", "unflatten", "reshape", "view", "permute", "transpose", "swapaxes", "t"),
    *("movedim", "unsqueeze", "squeeze", "expand", "repeat", "roll", "flip", "fold", "unfold"),
    *("cat", "concat", "stack", "chunk", "split", "tensor_split", "unbind", "getitem"),
    *("narrow", "select", "pad", "interpolate", "upsample", "pixel_shuffle", "batch_norm"),
    *(f"{kind}avg_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3)),
}
#: ... and of those that are if there is only one such tensor.
BILINEAR = {"mul", "matmul", "bmm", "einsum", "linear", "conv1d", "conv2d", "conv3d"}
AFFINE_LAYERS = (
    *(nn.Linear, nn.Identity, nn.Flatten, nn.Unflatten, nn.Upsample, nn.PixelShuffle),
    *(nn.ZeroPad2d, nn.ConstantPad2d, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
)
#: Operators that change their first operand, and those that do not.
IN_PLACE = {
    getattr(operator, f"i{name}"): getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv")
}
#: Activations in whose place neurons are put.
RELU_LAYERS = nn.ReLU, nn.ReLU6, QCFS


class RunningMean(OnSequences):
    """The mean of the steps so far, `m[t] = (x[1] + ... + x[t]) / t`."""

    def over_time(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.cumsum(0) / _counts(x)


class StepsOfMean(OnSequences):
    """The steps whose running mean is the input, `x[t] = t m[t] - (t - 1) m[t - 1]`."""

    def over_time(self, m: Tensor) -> Tensor:  # type: ignore[override]
        sums = m * _counts(m)
        return torch.cat([sums[:1], sums[1:] - sums[:-1]])


def _counts(x: Tensor) -> Tensor:
    steps = torch.arange(1, len(x) + 1, dtype=x.dtype, device=x.device)
    return steps.view(-1, *[1] * (x.ndim - 1))


class _Tracer(fx.Tracer):
    def __init__(self, leaves: tuple[type[nn.Module], ...]) -> None:
        super().__init__()
        self._leaves = leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, self._leaves) or super().is_leaf_module(m, module_qualified_name)


def traced(net: nn.Module, leaves: tuple[type[nn.Module], ...] = ()) -> fx.GraphModule:
    """Return a network as a graph, whose operations change no tensors. Arguments of `forward` with
    a default have that value.

    Args:
        leaves: layers that are not traced, besides those of torch.nn.

    Raises:
        ValueError: torch.fx cannot trace it.
    """
    tracer = _Tracer((*RELU_LAYERS, *leaves))
    parameters = inspect.signature(net.forward).parameters.values()
    fixed = {p.name: p.default for p in parameters if p.default is not p.empty}
    try:
        graph = tracer.trace(net, fixed)
    except Exception as error:
        raise ValueError(
            f"torch.fx cannot trace {type(net).__name__}: {error}. Code that decides by the values "
            "of tensors belongs in a function marked by torch.fx.wrap"
        ) from error
    _erase_arguments(graph)
    result = fx.GraphModule(net, graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in [node for node in graph.nodes if _changes_first(result, node)]:
        _return_new_tensor(result, node)
        changed, at = node.args[0], order[node]
        changed.replace_all_uses_with(node, lambda user, at=at: order[user] > at)
    result.recompile()
    return result


def _erase_arguments(graph: fx.Graph) -> None:
    """Erase the inputs with a default, and the checks that they have that value."""
    derived: dict[fx.Node, None] = {}
    for node in graph.nodes:
        read = node.all_input_nodes
        if (node.op == "placeholder" and node.args) or (read and derived.keys() >= {*read}):
            derived[node] = None
    for node in reversed(derived):
        graph.erase_node(node)


def _changes_first(net: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node changes its first argument."""
    if node.op == "call_module":
        return bool(getattr(net.get_submodule(str(node.target)), "inplace", False))
    if not node.op.startswith("call"):
        return False
    name = name_of(node)
    return (
        node.target in IN_PLACE
        or bool(node.kwargs.get("inplace"))
        or (name.endswith("_") and not name.startswith("_"))
    )


def _return_new_tensor(net: fx.GraphModule, node: fx.Node) -> None:
    """Let a node that changes its first argument return a new tensor."""
    target: Any = node.target
    if node.op == "call_module":
        vars(net.get_submodule(target))["inplace"] = False
    elif target in IN_PLACE:
        node.target = IN_PLACE[target]
    elif node.kwargs.get("inplace"):
        node.kwargs = {**node.kwargs, "inplace": False}
    elif node.op == "call_method":
        node.target = target[:-1]
    else:
        name = name_of(node)[:-1]
        node.target = getattr(F, name, None) or getattr(torch, name)


def fold_norms(net: fx.GraphModule, num_dims: Mapping[fx.Node, int]) -> None:
    """Fold each batch norm into the convolution or linear layer in front of it.

    Args:
        num_dims: of the values of nodes.
    """
    calls = [node.target for node in net.graph.nodes if node.op == "call_module"]
    # Layers whose tensors the network reads itself, such as tied weights.
    read = {str(n.target).rpartition(".")[0] for n in net.graph.find_nodes(op="get_attr")}
    for node in net.graph.find_nodes(op="call_module"):
        norm = net.get_submodule(node.target)
        above = node.all_input_nodes[0] if node.all_input_nodes else None
        if not isinstance(norm, BatchNorm) or norm.running_mean is None:
            continue
        if above is None or above.op != "call_module" or len(above.users) > 1:
            continue
        if above.target in read:
            continue
        layer = net.get_submodule(above.target)
        if calls.count(node.target) > 1 or calls.count(above.target) > 1:
            continue
        if is_parametrized(layer) or is_parametrized(norm) or any(hooks_of([layer, norm])):
            continue
        if isinstance(layer, nn.Linear) and num_dims[above] == 2:
            folded: nn.Module = fuse_linear_bn_eval(layer, norm)
        elif isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            folded = fuse_conv_bn_eval(layer, norm)
        else:
            continue
        assert isinstance(folded.bias, nn.Parameter)
        folded.bias.requires_grad_(layer.weight.requires_grad)  # which is new for some layers
        net.set_submodule(above.target, folded)
        node.replace_all_uses_with(above)
        net.graph.erase_node(node)
    net.delete_all_unused_submodules()


def is_relu(net: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node is an activation that becomes a neuron."""
    target: Any = node.target
    if node.op == "call_module":
        return isinstance(net.get_submodule(target), RELU_LAYERS)
    if node.op not in ("call_function", "call_method"):
        return False
    known = METHODS if node.op == "call_method" else FUNCTIONS
    is_clamp = target in ("clamp", "clamp_min", torch.clamp, torch.clamp_min)
    limits = (*node.args[1:], *node.kwargs.items())
    return known.get(target) in RELU_LAYERS or (is_clamp and limits in ((0,), (("min", 0),)))


def learned_threshold(net: fx.GraphModule, node: fx.Node) -> float | None:
    """The threshold of a quantized ReLU; None for other activations."""
    module = net.get_submodule(str(node.target)) if node.op == "call_module" else None
    return float(module.threshold) if isinstance(module, QCFS) else None


class Recorder(fx.Interpreter):
    """Runs a network, and records the outputs of its activations.

    Args:
        net: the network.
        also: layers whose outputs are recorded besides those of ReLUs.

    Attributes:
        values: by activation, in the last run.
        active: the nodes whose tensors depend on the input, with the number of their dims.
        discrete: those with integers or booleans.
    """

    def __init__(self, net: fx.GraphModule, also: tuple[type[nn.Module], ...]) -> None:
        super().__init__(net)
        self.extra_traceback = False  # the lines of the graph, which are not the user's
        self.net, self.also = net, also
        self.values: dict[fx.Node, Tensor] = {}
        self.active: dict[fx.Node, int] = {}
        self.discrete: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        first = value[0] if isinstance(value, tuple | list) and value else value
        reads = not self.active.keys().isdisjoint(n.all_input_nodes)
        if isinstance(first, Tensor) and (n.op == "placeholder" or reads):
            self.active[n] = first.ndim
            if not first.is_floating_point():
                self.discrete.add(n)
            _refuse_joined_batches(n)
            is_other = n.op == "call_module" and isinstance(
                self.net.get_submodule(str(n.target)), self.also
            )
            if is_relu(self.net, n) or is_other:
                self.values[n] = value
        return value


def _refuse_joined_batches(node: fx.Node) -> None:
    """Raise a ValueError for tensors that are joined along the batch."""
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if name_of(node) in ("cat", "concat", "concatenate", "stack") and dim == 0:
        raise ValueError(
            f"'{node.name}' joins tensors along dim 0, the batch, which also holds the time steps "
            "of a spiking network: call the layers on each tensor"
        )


def _is_affine(net: fx.GraphModule, node: fx.Node, recorder: Recorder) -> bool:
    """Whether a node is an affine function of the tensors that depend on the input."""
    reads: list[fx.Node] = []  # with repetitions
    fx.node.map_arg((node.args, node.kwargs), reads.append)
    reads = [x for x in reads if x in recorder.active]
    target: Any = node.target
    if node in recorder.discrete or any(x in recorder.discrete for x in reads):
        return False
    if node.op == "call_module":
        layer = net.get_submodule(target)
        is_fixed = not isinstance(layer, BatchNorm) or layer.running_mean is not None
        return isinstance(layer, AFFINE_LAYERS) and is_fixed
    if inspect.isfunction(target) and not target.__module__.startswith("torch"):
        return False
    name = name_of(node)
    if name in ("truediv", "div"):
        return reads == [node.args[0]]
    return name in AFFINE or (name in BILINEAR and len(reads) == 1)


def rewrite(
    net: fx.GraphModule, recorder: Recorder, neurons: Mapping[fx.Node, nn.Module]
) -> tuple[list[str], list[str]]:
    """Put neurons in place of ReLUs and behind other activations, and let operations that are not
    affine read running means.

    Returns:
        The names of the neurons, and what reads running means.
    """
    graph, names, others = net.graph, list[str](), list[str]()
    #: Whether the values of a node are running means, not steps, and the node of the other kind.
    means: dict[fx.Node, bool] = {}
    converted: dict[fx.Node, fx.Node] = {}
    # Before modules are replaced, which may be called several times.
    relus = {node for node in neurons if is_relu(net, node)}
    for node in relus:
        if node.op == "call_module":
            refuse_hooks(f"'{node.target}'", net.get_submodule(str(node.target)))
    kept = [node.target for node in graph.find_nodes(op="call_module") if node not in relus]
    replaced_modules = {node.target for node in relus if node.target not in kept}
    taken = {name for name, _ in net.named_modules()} - replaced_modules
    to_means, to_steps = (_free_name(name, taken) for name in ("running_mean", "steps_of_mean"))
    net.set_submodule(to_means, RunningMean())
    net.set_submodule(to_steps, StepsOfMean())

    def read(node: fx.Node, as_means: bool) -> None:
        """Let a node read steps or running means."""
        for x in node.all_input_nodes:
            if x in means and means[x] != as_means:
                if x in recorder.discrete:
                    raise ValueError(f"'{x.name}' has integers or booleans: expected none there")
                if x not in converted:
                    with graph.inserting_after(x):
                        converted[x] = graph.call_module(to_means if as_means else to_steps, (x,))
                node.replace_input_with(x, converted[x])

    for node in list(graph.nodes):
        replaced = node in relus
        if node.op == "output" or replaced:
            read(node, False)
        elif node in recorder.active:
            is_input = node.op == "placeholder"
            affine = is_input or _is_affine(net, node, recorder)
            # Integers as inputs are the same in each step, and so their own means.
            is_mean = not affine or (is_input and node in recorder.discrete)
            is_mean = is_mean or any(means.get(x) for x in node.all_input_nodes)
            read(node, is_mean)
            means[node] = is_mean
            if not affine:
                is_layer = node.op == "call_module"
                others.append(str(node.target) if is_layer else name_of(node) or node.name)
        if node in neurons:
            base = str(node.target) if node.op == "call_module" else node.name
            names.append(_free_name(base if replaced else f"{base}_spikes", taken))
            net.set_submodule(names[-1], neurons[node])
            with graph.inserting_after(node):
                spikes = graph.call_module(names[-1], (node.args[0] if replaced else node,))
            node.replace_all_uses_with(spikes, lambda user, spikes=spikes: user is not spikes)
            if replaced:
                graph.erase_node(node)
            else:
                read(spikes, False)
            means[spikes] = False
    graph.lint()
    net.delete_all_unused_submodules()
    net.recompile()
    return names, others


def _free_name(base: str, taken: set[str]) -> str:
    """A name that is not taken yet, with a number if need be; it then is."""
    name, i = base, 2
    while name in taken:
        name, i = f"{base}_{i}", i + 1
    taken.add(name)
    return name
