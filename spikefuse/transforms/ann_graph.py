"""The graph of a network with activations, and its rewriting into one with spikes."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from spikefuse.kernels.norm import BatchNorm
from spikefuse.nn.activations import QCFS
from spikefuse.nn.over_time import OnSequences

#: Names of functions and methods that are affine in all tensors that depend on the input, ...
AFFINE = {
    *(
        "add",
        "sub",
        "neg",
        "cat",
        "concat",
        "stack",
        "mean",
        "sum",
        "pad",
        "to",
        "float",
        "dropout",
    ),
    *(
        "flatten",
        "unflatten",
        "reshape",
        "view",
        "permute",
        "transpose",
        "swapaxes",
        "t",
        "movedim",
    ),
    *(
        "unsqueeze",
        "squeeze",
        "expand",
        "repeat",
        "contiguous",
        "clone",
        "chunk",
        "split",
        "unbind",
    ),
    *("tensor_split", "getitem", "narrow", "select", "roll", "flip", "fold", "unfold"),
    *("interpolate", "upsample", "pixel_shuffle", "batch_norm"),
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
    """Return a copy of a network as a graph in evaluation mode, without changes in place, and with
    batch norms folded.

    Args:
        leaves: layers that are not traced, besides those of torch.nn.

    Raises:
        ValueError: torch.fx cannot trace it.
    """
    tracer = _Tracer((*RELU_LAYERS, *leaves))
    try:
        graph = tracer.trace(copy.deepcopy(net).eval())
    except Exception as error:
        raise ValueError(
            f"torch.fx cannot trace {type(net).__name__}: {error}. Code that decides by the values "
            "of tensors belongs into a function marked by torch.fx.wrap"
        ) from error
    assert isinstance(tracer.root, nn.Module)
    result = fx.GraphModule(tracer.root, graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if _change_in_place_no_longer(result, node):
            changed, at = node.args[0], order[node]
            changed.replace_all_uses_with(node, lambda user, at=at: order[user] > at)
    _fold_norms(result)
    result.recompile()
    return result


def _change_in_place_no_longer(net: fx.GraphModule, node: fx.Node) -> bool:
    """Let a node return a new tensor; return whether it changed its first argument before."""
    target: Any = node.target
    if node.op == "call_module":
        module: Any = net.get_submodule(target)
        if not getattr(module, "inplace", False):
            return False
        module.inplace = False
    elif target in IN_PLACE:
        node.target = IN_PLACE[target]
    elif node.kwargs.get("inplace"):
        node.kwargs = {**node.kwargs, "inplace": False}
    elif node.op.startswith("call") and name_of(node).endswith("_") and node.op != "call_function":
        node.target = target[:-1]
    else:
        return False
    return True


def _fold_norms(net: fx.GraphModule) -> None:
    """Fold each batch norm into the convolution or linear layer in front of it."""
    calls = [node.target for node in net.graph.nodes if node.op == "call_module"]
    for node in net.graph.find_nodes(op="call_module"):
        norm = net.get_submodule(node.target)
        above = node.all_input_nodes[0] if node.all_input_nodes else None
        if not isinstance(norm, BatchNorm) or above is None or above.op != "call_module":
            continue
        layer = net.get_submodule(above.target)
        if len(above.users) > 1 or calls.count(node.target) > 1 or calls.count(above.target) > 1:
            continue
        if isinstance(layer, nn.Linear):
            folded: nn.Module = fuse_linear_bn_eval(layer, norm)
        elif isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            folded = fuse_conv_bn_eval(layer, norm)
        else:
            continue
        assert isinstance(folded.bias, nn.Parameter)
        folded.bias.requires_grad_(layer.weight.requires_grad)  # which is new for some layers
        set_module(net, above.target, folded)
        node.replace_all_uses_with(above)
        net.graph.erase_node(node)
    net.delete_all_unused_submodules()


def name_of(node: fx.Node) -> str:
    """The name of the function or method that a node calls."""
    target: Any = node.target
    return target if isinstance(target, str) else target.__name__


def set_module(net: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module where a dotted path leads."""
    parent, _, name = path.rpartition(".")
    setattr(net.get_submodule(parent), name, module)


def is_relu(net: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node is an activation that becomes a neuron."""
    if node.op == "call_module":
        return isinstance(net.get_submodule(str(node.target)), RELU_LAYERS)
    if node.op not in ("call_function", "call_method"):
        return False
    return name_of(node) in ("relu", "relu6") or (
        name_of(node) == "clamp_min" and node.args[1:] == (0,)
    )


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
        active: the nodes whose tensors depend on the input.
    """

    def __init__(self, net: fx.GraphModule, also: tuple[type[nn.Module], ...]) -> None:
        super().__init__(net)
        self.net, self.also = net, also
        self.values: dict[fx.Node, Tensor] = {}
        self.active: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        first = value[0] if isinstance(value, tuple | list) and value else value
        has_tensors = isinstance(first, Tensor) and first.is_floating_point()
        is_input = n.op == "placeholder"
        if has_tensors and (is_input or not self.active.isdisjoint(n.all_input_nodes)):
            self.active.add(n)
            is_other = n.op == "call_module" and isinstance(
                self.net.get_submodule(str(n.target)), self.also
            )
            if is_relu(self.net, n) or is_other:
                self.values[n] = value
        return value


def is_affine(net: fx.GraphModule, node: fx.Node, active: set[fx.Node]) -> bool:
    """Whether a node is an affine function of the tensors that depend on the input."""
    if node.op == "call_module":
        return isinstance(net.get_submodule(str(node.target)), AFFINE_LAYERS)
    name, reads = name_of(node), [x for x in node.all_input_nodes if x in active]
    if name in ("truediv", "div"):
        return reads == [node.args[0]]
    return name in AFFINE or (name in BILINEAR and len(reads) == 1 and reads[0] is not None)


def rewrite(
    net: fx.GraphModule, active: set[fx.Node], neurons: Mapping[fx.Node, nn.Module]
) -> tuple[list[str], list[str]]:
    """Put neurons in place of ReLUs and behind other activations, and let operations that are not
    affine read running means.

    Returns:
        The names of the neurons, and what reads running means.
    """
    graph, names, others = net.graph, list[str](), list[str]()
    net.add_module("running_mean", RunningMean())
    net.add_module("steps_of_mean", StepsOfMean())
    #: Whether the values of a node are running means, not steps, and the node of the other kind.
    means: dict[fx.Node, bool] = {}
    converted: dict[fx.Node, fx.Node] = {}
    # Before modules are replaced, which may be called several times.
    relus = {node for node in neurons if is_relu(net, node)}

    def read(node: fx.Node, as_means: bool) -> None:
        """Let a node read steps or running means."""
        for x in node.all_input_nodes:
            if x in means and means[x] != as_means:
                if x not in converted:
                    with graph.inserting_after(x):
                        kind = "running_mean" if as_means else "steps_of_mean"
                        converted[x] = graph.call_module(kind, (x,))
                node.replace_input_with(x, converted[x])

    for node in list(graph.nodes):
        replaced = node in relus
        if node.op == "output" or replaced:
            read(node, False)
        elif node in active:
            affine = node.op == "placeholder" or is_affine(net, node, active)
            is_mean = not affine or any(means.get(x) for x in node.all_input_nodes)
            read(node, is_mean)
            means[node] = is_mean
            if not affine:
                others.append(str(node.target) if node.op == "call_module" else name_of(node))
        if node in neurons:
            names.append(_free_name(net, node, names, replaced))
            set_module(net, names[-1], neurons[node])
            with graph.inserting_after(node):
                spikes = graph.call_module(names[-1], (node.args[0] if replaced else node,))
            node.replace_all_uses_with(spikes, lambda user, spikes=spikes: user is not spikes)
            if replaced:
                graph.erase_node(node)
            else:
                read(spikes, False)
            active.add(spikes)
            means[spikes] = False
    graph.lint()
    net.delete_all_unused_submodules()
    net.recompile()
    return names, others


def _free_name(net: fx.GraphModule, node: fx.Node, taken: Sequence[str], replaced: bool) -> str:
    """The name of a neuron: that of the module, with a number if it is called again."""
    base = str(node.target) if node.op == "call_module" else node.name
    name, i = base if replaced else f"{base}_spikes", 2
    while name in taken:
        name, i = f"{base}_{i}", i + 1
    return name
