"""Fuse a network: a copy of it that runs as the graphs that TorchDynamo captures."""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from spikefuse._torch import is_compiled, separate
from spikefuse.block import batch_norm
from spikefuse.graph.captured import Captured
from spikefuse.graph.report import Fusion
from spikefuse.kernels.norm import BatchNorm
from spikefuse.nn.neuron import check_module
from spikefuse.nn.temporal import Temporal, run_captured

M = TypeVar("M", bound=nn.Module)


def fuse(model: M, mode: str = "auto") -> M:
    """Return a network that runs as a fused graph.

    TorchDynamo captures the calls of the network. In its graphs, norm → neuron and norm → add →
    neuron become one operation each, also where the norm is multiplied by a factor, or where a
    convolution with a bias stands in place of it. Layers before the first neuron compute one step
    of an input that is the same at each step, and poolings run on kernels of this library. Whatever
    else the network does runs as it is. A change of training mode, grad mode, autocast or input
    shape triggers a new capture. Where a network cannot be captured, it runs unfused: slower, never
    different.

    The result is a new module with the same names. It shares parameters and buffers with `model`,
    which remains usable; training mode, hooks and other attributes are its own. State dicts load
    both ways, and an optimizer of one trains both. In a model that contains a `Temporal`, what the
    `Temporal` runs is captured; any other module is captured whole, such as a network that handles
    `[T, B, ...]` itself.

    Example::

        layers = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), sf.LIF())
        net = sf.fuse(sf.Temporal(layers))
        y = net(torch.rand(4, 8, 3, 32, 32))
        print(net.fusion)

    Args:
        model: a network with neurons.
        mode: how graphs run: "eager" (no compiler is needed), "inductor", "recorded" (replays of
            CUDA graphs), or "auto": "eager" on a CPU, and on a GPU what is fastest.

    Returns:
        The fused network. Its attribute `fusion` reports what was fused in the last captured
        graphs, and why the rest was not: see `spikefuse.graph.report.Fusion`.

    Raises:
        TypeError: `model` is not a module, or one that PyTorch has distributed or compiled: fuse it
            before.
        ValueError: the mode is unknown, or layers are lazy and were never called.
    """
    check_module("model", model)
    _check(model)
    compiled = {m for part in model.modules() if is_compiled(part) for m in part.modules()}
    names = {m: f"{name}.net." if name else "net." for name, m in model.named_modules()
             if isinstance(m, Temporal) and m not in compiled}  # fmt: skip
    copies = ModuleCopies(model)
    result: Any = copies.of(model)
    all_captured = []
    for module, prefix in names.items():
        all_captured.append(Captured(mode, prefix))
        container = copies.of(module)
        container.captured, container.listed = all_captured[-1], copy.copy(module.listed)
    if not names:
        all_captured.append(Captured(mode))
        vars(result)["forward"] = partial(run_fused, all_captured[0], result)
    inside = tuple(names.values()) or ("",)
    outside = [name for name, m in model.named_modules()
               if isinstance(m, BatchNorm) and not name.startswith(inside)]  # fmt: skip
    vars(result)["fusion"] = Fusion(tuple(c.report for c in all_captured), tuple(outside))
    return result


def _check(model: nn.Module) -> None:
    """Refuse a model that cannot be copied, or whose attributes `fuse` would replace."""
    for name, module in model.named_modules():
        where = f"'{name}'" if name else "model"
        if isinstance(module, DataParallel | DistributedDataParallel):
            raise TypeError(
                f"{where} is a {type(module).__name__}, which holds the network as it is: fuse "
                f"the network first, {type(module).__name__}(spikefuse.fuse(net))"
            )
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            raise TypeError(
                f"the parameters of {where} are split by fully_shard, which allows no copies: fuse "
                "the network first, fully_shard(spikefuse.fuse(net))"
            )
    if is_compiled(model):
        raise TypeError(
            "model is compiled already: fuse the network first, torch.compile(spikefuse.fuse(net))"
        )
    own = vars(model).get("forward")
    wrap = "fuse a module around it, spikefuse.fuse(nn.Sequential(model))"
    if own is not None and getattr(own, "func", None) is not run_fused:
        raise TypeError(f"model.forward was assigned to the instance: {wrap}")
    if not isinstance(getattr(model, "fusion", None), Fusion | None):
        raise TypeError(f"model.fusion exists, where fuse stores its report: {wrap}")
    if any(is_lazy(x) for x in (*model.parameters(), *model.buffers())):
        raise ValueError("model has lazy layers without values: call it once, then fuse it")


class ModuleCopies:
    """Copies of the modules of a network, which refer to each other and share all tensors.

    References to a module are followed in its attributes, in hooks, and there in lists, tuples,
    dicts and sets, bound methods, partial functions, closures and default arguments. Other objects
    are shared, with the modules that they hold.
    """

    def __init__(self, model: nn.Module) -> None:
        #: What was copied and its copy, by id: without a reference, an id may name another object.
        self._made: dict[int, tuple[Any, Any]] = {
            id(module): (module, _without_references(module)) for module in model.modules()
        }
        for module, copied in [*self._made.values()]:
            if copied is not module:
                state = vars(copied)
                state.update({name: self.of(value) for name, value in state.items()})
                if is_compiled(copied):
                    copied.__setstate__(copied.__getstate__())  # which compiles the copy

    def of(self, value: Any) -> Any:
        """Return `value` with references to the copies, or itself if it refers to no module."""
        key = id(value)
        if key not in self._made:
            self._made[key] = value, value  # for a container that contains itself
            self._made[key] = value, self._copy(value)
        return self._made[key][1]

    def _copy(self, value: Any) -> Any:
        if isinstance(value, MethodType):
            owner = self.of(value.__self__)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if isinstance(value, partial):
            old = value.func, value.args, value.keywords
            function, args, options = new = [*map(self.of, old)]
            return value if _are_same(old, new) else partial(function, *args, **options)
        if type(value).__module__ == nn.Module.__module__ and hasattr(value, "with_module"):
            bound = copy.copy(value)  # a hook of state dicts, bound to its module
            bound.__setstate__(self.of(bound.__getstate__()))
            return bound
        if isinstance(value, FunctionType):
            return self._copy_function(value)
        return self._copy_container(value)

    def _copy_function(self, function: FunctionType) -> FunctionType:
        # Only modules and their methods: lists that a function changes are read elsewhere.
        def copied(value: Any) -> Any:
            return self.of(value) if isinstance(value, nn.Module | MethodType) else value

        cells, empty = function.__closure__ or (), CellType()
        named = function.__kwdefaults__ or {}
        old = [None if cell == empty else cell.cell_contents for cell in cells]
        old += [*(function.__defaults__ or ()), *named.values()]
        new = [*map(copied, old)]
        if _are_same(old, new):
            return function
        closure = tuple(
            cell if x is y else CellType(y) for cell, x, y in zip(cells, old, new, strict=False)
        )
        defaults = tuple(new[len(cells) : len(new) - len(named)]) or None
        code, names = function.__code__, function.__globals__
        result = FunctionType(code, names, function.__name__, defaults, closure or None)
        result.__kwdefaults__ = dict(zip(named, new[len(new) - len(named) :], strict=True)) or None
        result.__qualname__ = function.__qualname__
        vars(result).update(vars(function))
        return result

    def _copy_container(self, value: Any) -> Any:
        kind = type(value)
        if kind in (list, tuple, set, frozenset):
            old = [*value]
            new = [*map(self.of, old)]
            return value if _are_same(old, new) else kind(new)
        if kind in (dict, OrderedDict):
            old = [item for pair in value.items() for item in pair]
            new = [*map(self.of, old)]
            return value if _are_same(old, new) else kind(zip(new[::2], new[1::2], strict=True))
        return value


def _without_references(module: nn.Module) -> nn.Module:
    """Return a copy that still refers to the modules that `module` refers to."""
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        return module  # which has its code and its mode in C++
    result: nn.Module
    if isinstance(module, nn.SyncBatchNorm) and kind is nn.SyncBatchNorm and batch_norm.traceable:
        result = batch_norm.traceable(module)
    else:
        result = object.__new__(kind)  # that of fx.GraphModule makes a class of its own
        # Without what torch.compile has made of it; parametrized modules refuse to be pickled.
        vars(result).update(nn.Module.__getstate__(module))
    separate(result, shares_tensors=True)
    return result


def _are_same(old: Sequence[Any], new: Sequence[Any]) -> bool:
    return all(map(operator.is_, old, new))


def run_fused(captured: Captured, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the `forward` of a fused module that is not a `Temporal`."""
    return run_captured(captured, _forward, module, args, kwargs)


def _forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return type(module).forward(module, *args, **kwargs)
