"""Layers that take sequences `[T, B, ...]`, for networks whose code is written for them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from spikefuse.neurons.definition import Neuron
from spikefuse.nn.call import active
from spikefuse.nn.temporal import Temporal
from spikefuse.transforms.converters.common import STATELESS, as_class


class _OverTime(nn.Module):
    """Fold time into the batch; a mixin over a class of layers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class SequentialSteps(nn.Sequential):
    """Layers of one time step, neurons among them, run over `[T, B, ...]`."""

    def forward(self, x: Any) -> Any:
        return Temporal(nn.Sequential(*self))(x)


_CLASSES = {
    kind: type(f"{kind.__name__}OverTime", (_OverTime, kind), {"__module__": __name__})
    for kind in (getattr(nn, name) for name in (*STATELESS, "Sequential"))
}
globals().update({cls.__name__: cls for cls in _CLASSES.values()})  # pickles name them


def over_time(layer: nn.Module) -> nn.Module:
    """Return a layer of one time step as one of `[T, B, ...]`; others take both."""
    if type(layer) is nn.Sequential and any(isinstance(m, Neuron) for m in layer.modules()):
        return as_class(SequentialSteps, layer)
    kind = _CLASSES.get(type(layer))
    return layer if kind is None else as_class(kind, layer)


def refuse_temporal(module: nn.Module, args: Any) -> None:
    """Forward pre-hook of a network whose code is written for `[T, B, ...]`."""
    if active.call is not None:
        raise ValueError(
            f"the code of {type(module).__name__} is written for [T, B, ...]: call the converted "
            "network as the original, without Temporal; its attribute `conversion` says which "
            "line to change for one time step"
        )
