"""Swap the batch norms of a network for ones that fuse with the neurons that read them."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Collection, Mapping
from typing import overload

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from spikefuse.block.block import Block
from spikefuse.block.fused_norm import FUSED, FusedNorm
from spikefuse.neurons.definition import Neuron
from spikefuse.nn.constant_input import is_compiled
from spikefuse.nn.neuron import check_module
from spikefuse.nn.pool import MaxPool2d
from spikefuse.nn.temporal import Temporal
from spikefuse.transforms.converters.common import as_class
from spikefuse.transforms.fusion import Fusion


@overload
def fuse(model: Temporal) -> Temporal: ...
@overload
def fuse(model: nn.Module) -> nn.Module: ...
def fuse(model: nn.Module) -> nn.Module:
    """Fuse norm → neuron, and norm → add → neuron, into one operation each.

    Each batch norm of `torch.nn` is swapped for a subclass whose result is computed when it is
    read: by a neuron, together with it, also after the addition of one tensor of the same shape and
    dtype; by anything else, as `torch.nn` computes it. The code of the network runs as it is, so
    control flow, random numbers, hooks and contexts such as `torch.no_grad()` work as before.
    Each `nn.MaxPool2d` is swapped for `spikefuse.nn.MaxPool2d`.

    The result is a new model with the same names. It shares parameters, buffers and all other
    layers with `model`, which remains usable. State dicts load both ways, and an optimizer of
    `model` trains both. In a model that has a `Temporal`, only what the `Temporal` runs changes.
    Modules that torch.compile or TorchScript has compiled are left alone.

    Norms fuse only inside a call of `Temporal`, and not under torch.compile, in
    `torch.inference_mode()` (use `torch.no_grad()`), or while they have forward or backward hooks.

    Args:
        model: a network with batch norms of `torch.nn` and neurons.

    Returns:
        The fused model, or `model` itself if there is nothing to swap. Its attribute `fusion`
        reports what the last call fused: see `spikefuse.transforms.fusion.Fusion`.

    Warns:
        UserWarning: the model has batch norms and neurons, but no norm can be fused.

    Raises:
        TypeError: `model` is not a module.
        RuntimeError: in a call of the result, a tensor is changed in place after a norm has read it
            and before the result of the norm is used.
    """
    check_module("model", model)
    closed = [m for m in model.modules() if is_compiled(m)]
    reasons = _reasons(model, closed)
    swapped: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        if reasons[module] is not None:
            continue
        if type(module) in FUSED:
            swapped[module] = _as(FUSED[type(module)], module)
        elif type(module) is nn.MaxPool2d:
            swapped[module] = as_class(MaxPool2d, module)
    result = _rebuilt(model, swapped, closed)
    norms = {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, _BatchNorm) and reasons[m] != _IN_BLOCK
    }
    neurons: dict[str, nn.Module] = {
        name: m for name, m in model.named_modules() if isinstance(m, Neuron)
    }
    fusion = Fusion(
        norms={name: swapped.get(m, m) for name, m in norms.items()},
        neurons=neurons,
        unsupported={name: reason for name, m in norms.items() if (reason := reasons[m])},
        pools=sum(isinstance(m, MaxPool2d) for m in swapped.values()),
    )
    result.__dict__["fusion"] = fusion
    if norms and neurons and not fusion.fused:
        given = "; ".join(sorted(set(fusion.unsupported.values())))
        warnings.warn(f"no batch norm can be fused: {given}", stacklevel=2)
    return result


_IN_BLOCK = "it is part of a Block"
#: Modules whose dict was replaced by one that can be shared.
_sharing: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _as(kind: type[nn.Module], module: nn.Module) -> nn.Module:
    """The same module, with its parameters, buffers, hooks and modes, as one of another class."""
    # The dict with which Python creates an object stores its values in the object. Shared by two
    # objects, garbage collection of Python 3.13.0 clears it when one of them is freed.
    if module not in _sharing:
        object.__setattr__(module, "__dict__", vars(module).copy())
        _sharing.add(module)
    made = kind.__new__(kind)
    object.__setattr__(made, "__dict__", vars(module))
    return made


def _reasons(model: nn.Module, closed: list[nn.Module]) -> dict[nn.Module, str | None]:
    """Why each module can't be swapped; None if it can."""
    # Modules that are reached without passing through a compiled one.
    open_modules = {module for _, module in model.named_modules(memo=set(closed))}
    containers: list[nn.Module] = [m for m in model.modules() if isinstance(m, Temporal)]
    inside = {m for c in containers or [model] for m in c.modules()}
    blocks = {m for block in model.modules() if isinstance(block, Block) for m in block.modules()}

    def reason(module: nn.Module) -> str | None:
        if module in blocks:
            return _IN_BLOCK
        if module not in open_modules:
            return "the module around it is compiled"
        if module not in inside:
            return "it is outside Temporal"
        norm = isinstance(module, _BatchNorm) and not isinstance(module, FusedNorm)
        if norm and type(module) not in FUSED:
            return f"{type(module).__name__} may compute something else than batch norm"
        return None

    return {module: reason(module) for module in model.modules()}


def _rebuilt(
    model: nn.Module, swapped: Mapping[nn.Module, nn.Module], closed: Collection[nn.Module]
) -> nn.Module:
    """`model` with modules swapped. The containers around them are shallow copies; all others,
    and those `closed`, are shared."""
    made = {module: module for module in closed} | dict(swapped)

    def build(module: nn.Module) -> nn.Module:
        if module in made:
            return made[module]
        children = {
            name: None if child is None else build(child) for name, child in module._modules.items()
        }
        result = module
        if any(child is not module._modules[name] for name, child in children.items()):
            result = copy.copy(module)
            result._modules = children
        made[module] = result
        return result

    return build(model)
