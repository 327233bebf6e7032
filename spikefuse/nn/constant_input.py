"""Input that does not change over time: the layers before the first neuron run on `[B, ...]`.

A network is analysed once, as a graph: what depends on the input and comes before every neuron is
the same at all steps. Neurons read such a tensor T times where it lies, and what they give changes
with time.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules import batchnorm, conv, dropout, pooling

from spikefuse.nn.activations import ACTIVATIONS, FUNCTIONS, METHODS
from spikefuse.nn.call import TemporalCall, active
from spikefuse.nn.neuron import Neuron
from spikefuse.nn.pool import max_pool2d
from spikefuse.nn.tracing import Untraceable, is_layer, trace

# What is not random, treats repeated rows alike, and keeps dim 0 as it is.
LAYERS = (
    *(kind for kind in ACTIVATIONS if kind is not nn.RReLU),
    conv._ConvNd,
    batchnorm._BatchNorm,
    dropout._DropoutNd,
    pooling._MaxPoolNd,
    pooling._AvgPoolNd,
    pooling._AdaptiveAvgPoolNd,
    pooling._AdaptiveMaxPoolNd,
    nn.Linear,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.Identity,
    nn.Flatten,
)
LAYER_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(function for function, kind in FUNCTIONS.items() if kind is not nn.RReLU),
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.neg),
    *(F.linear, F.conv1d, F.conv2d, F.conv3d, F.layer_norm, F.group_norm),
    *(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, F.max_pool1d, F.max_pool2d, F.max_pool3d),
    max_pool2d,
    *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
)
LAYER_METHODS = (*METHODS, "float", "contiguous", "add", "sub", "mul", "div")


@dataclass(frozen=True)
class ConstantPlan:
    """What the analysis of a network in one mode has found."""

    modules: tuple[nn.Module, ...]
    training: tuple[bool, ...]
    shared: bool  # whether anything can be computed once
    norms: tuple[batchnorm._BatchNorm, ...]  # the ones among it whose statistics run

    def fits(self, modules: tuple[nn.Module, ...]) -> bool:
        """Whether the network is still made of the same modules in the same modes."""
        return (
            len(modules) == len(self.modules)
            and all(map(operator.is_, modules, self.modules))
            and tuple(m.training for m in modules) == self.training
        )


def make_plan(net: nn.Module, modules: tuple[nn.Module, ...]) -> ConstantPlan:
    found: list[nn.Module] | None
    try:
        alone = isinstance(net, Neuron)
        found = [] if alone else _layers_before_neurons(net, trace(net))
    except Untraceable:
        found = None
    norms = tuple(
        m
        for m in dict.fromkeys(found or ())  # each once
        if isinstance(m, batchnorm._BatchNorm) and m.training and m.running_var is not None
    )
    return ConstantPlan(modules, tuple(m.training for m in modules), found is not None, norms)


def _layers_before_neurons(net: nn.Module, graph: fx.Graph) -> list[nn.Module] | None:
    """The modules that can run on one step for all; None if not everything there can, or if what
    they give meets something that changes with time elsewhere than in a neuron."""
    constant: set[fx.Node] = set()
    varying: set[fx.Node] = set()
    layers: list[nn.Module] = []
    for node in graph.nodes:
        same = [n for n in node.all_input_nodes if n in constant]
        changing = [n for n in node.all_input_nodes if n in varying]
        module = net.get_submodule(str(node.target)) if node.op == "call_module" else None
        if node.op == "placeholder":
            if constant:  # a further argument, whose default decides what forward does
                return None
            constant.add(node)
        elif same and (changing or node.op == "output"):
            return None
        elif fires(module) or changing:
            varying.add(node)
        elif same:
            if not is_plain(node, module):
                return None
            constant.add(node)
            layers += [module] if module is not None else []
    return layers if varying else None


def fires(module: nn.Module | None) -> bool:
    """Whether the module is a neuron, or a layer whose output is that of a neuron inside."""
    if module is None or not is_layer(module):
        return False
    return isinstance(module, Neuron) or isinstance(getattr(module, "neuron", None), Neuron)


def is_plain(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether it computes each row along dim 0 by itself and alike, but for the statistics of a
    batch norm, and gives the same when called again."""
    if module is None:
        if node.target in (torch.flatten, "flatten"):
            return len(node.args) > 1 and isinstance(node.args[1], int) and node.args[1] > 0
        return node.target in (LAYER_METHODS if node.op == "call_method" else LAYER_FUNCTIONS)
    if isinstance(module, nn.Flatten):
        return module.start_dim > 0
    if isinstance(module, nn.SyncBatchNorm):
        return False
    random = isinstance(module, dropout._DropoutNd) and module.training
    return isinstance(module, LAYERS) and not random


def is_constant(x: Tensor) -> bool:
    """Whether `x` `[T, B, ...]` is one step T times, and nobody asks for its gradient per step."""
    return (
        x.stride(0) == 0
        and x.shape[0] > 1
        and x.shape[1] > 0
        and not x.requires_grad
        and not torch.compiler.is_compiling()
    )


def can_share(plan: ConstantPlan, batch: int) -> bool:
    """Whether a call may follow the plan now."""
    # One value per channel, which one sample may be, has no variance: T*B values have.
    if not plan.shared or (plan.norms and batch == 1):
        return False
    # Hooks see the tensors of all steps, as without sharing.
    return not any(
        (m._forward_hooks or m._forward_pre_hooks) and not isinstance(m, Neuron)
        for m in plan.modules
    )


@contextlib.contextmanager
def same_statistics(plan: ConstantPlan, call: TemporalCall) -> Iterator[None]:
    """Let batch norms that run on `[B, ...]` record the running variance of T times as many values.

    Norms that see to it themselves, by `repeated_statistics`, say so by an attribute.
    """
    corrections: dict[nn.Module, contextlib.AbstractContextManager[None]] = {}

    def before(norm: nn.Module, args: tuple[Tensor]) -> None:
        if active.call is call:
            assert isinstance(norm, batchnorm._BatchNorm)
            corrections[norm] = repeated_statistics(norm, args[0], call.num_steps)
            corrections[norm].__enter__()

    def after(norm: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        if active.call is call:
            corrections.pop(norm).__exit__(None, None, None)

    norms = [norm for norm in plan.norms if not getattr(norm, "counts_steps", False)]
    handles = [
        handle
        for norm in norms
        for handle in (
            norm.register_forward_pre_hook(before),
            norm.register_forward_hook(after),
        )
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def repeated_statistics(norm: batchnorm._BatchNorm, x: Tensor, num_steps: int) -> Iterator[None]:
    """Correct the running variance that a norm records inside for `x`, one step for all.

    Mean and variance of a batch do not change when it is repeated, but the recorded value is the
    variance times n / (n - 1), with n the values per channel: here B and not T*B times the size.
    """
    if not norm.training or not norm.track_running_stats or norm.running_var is None:
        yield
        return
    before = norm.running_var.clone()
    yield
    values = x.numel() // x.shape[1]
    ratio = num_steps * (values - 1) / (num_steps * values - 1)
    momentum: float | Tensor
    if norm.momentum is not None:
        momentum = norm.momentum
    else:  # a plain mean over all batches
        assert norm.num_batches_tracked is not None
        momentum = 1 / norm.num_batches_tracked
    # Not a change that autograd should see: backward in training does not use it.
    variance = norm.running_var.data
    added = variance - (1 - momentum) * before
    variance.sub_((1 - ratio) * added)
