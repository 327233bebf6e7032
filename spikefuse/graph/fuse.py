"""Fuse a network: a copy of it that runs as the graphs that TorchDynamo captures."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from spikefuse._torch import children_of, separate
from spikefuse.graph.captured import Captured
from spikefuse.graph.report import Fusion
from spikefuse.nn.neuron import check_module
from spikefuse.nn.temporal import Temporal, run_captured

M = TypeVar("M", bound=nn.Module)


def fuse(model: M, mode: str = "auto") -> M:
    """Return a network that runs as a fused graph.

    TorchDynamo captures the calls of the network. In its graphs, norm → neuron and norm → add →
    neuron become one operation each, layers before the first neuron compute one step of an input
    that is the same at each step, and poolings run on kernels of this library. Whatever else the
    network does runs as it is. Another mode of training, gradients or autocast, or another shape is
    captured anew. Where a network cannot be captured, it runs unfused: slower, never different.

    The result is a new module with the same names. It shares parameters, buffers and layers with
    `model`, which remains usable. State dicts load both ways, and an optimizer of one trains both.
    In a model that contains a `Temporal`, what the `Temporal` runs is captured; any other module is
    captured whole, such as a network that handles `[T, B, ...]` itself.

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
        ValueError: the mode is unknown.
    """
    check_module("model", model)
    for name, module in model.named_modules():
        if isinstance(module, DataParallel | DistributedDataParallel):
            where = f"'{name}'" if name else "model"
            raise TypeError(
                f"{where} is a {type(module).__name__}, which holds the network as it is: fuse "
                f"the network first, {type(module).__name__}(spikefuse.fuse(net))"
            )
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            where = f"'{name}'" if name else "model"
            raise TypeError(
                f"the parameters of {where} are split by fully_shard, which allows no copies: fuse "
                "the network first, fully_shard(spikefuse.fuse(net))"
            )
    if is_compiled(model):
        raise TypeError(
            "model is compiled already: fuse the network first, torch.compile(spikefuse.fuse(net))"
        )
    compiled = {m for part in model.modules() if is_compiled(part) for m in part.modules()}
    names = {m: f"{name}.net." if name else "net." for name, m in model.named_modules()
             if isinstance(m, Temporal) and m not in compiled}  # fmt: skip
    containers: dict[nn.Module, Captured] = {
        m: Captured(mode, prefix) for m, prefix in names.items()
    }
    made: dict[nn.Module, nn.Module] = {}

    def build(module: nn.Module) -> nn.Module:
        """A copy of a module that leads to one that changes, or the module itself."""
        if module not in made:
            changed = {name: child for name, old in children_of(module).items()
                       if (child := build(old)) is not old}  # fmt: skip
            made[module] = module
            if module in containers or changed:
                made[module] = copied = copy.copy(module)
                separate(copied)
                for name, child in changed.items():
                    copied.add_module(name, child)
                if isinstance(copied, Temporal):
                    copied.captured = containers[module]
        return made[module]

    result: Any = build(model) if containers else copy.copy(model)
    all_captured = [*containers.values()] or [Captured(mode)]
    if not containers:
        vars(result)["forward"] = _Forward(result, all_captured[0])
    vars(result)["fusion"] = Fusion(tuple(c.report for c in all_captured))
    return result


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is the result of `torch.compile`."""
    return type(module).__name__ == "OptimizedModule"


class _Forward:
    """The `forward` of a fused module that is not a `Temporal`."""

    def __init__(self, module: nn.Module, captured: Captured) -> None:
        self.module, self.captured = module, captured

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_captured(self.captured, _forward, self.module, args, kwargs)


def _forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return type(module).forward(module, *args, **kwargs)
