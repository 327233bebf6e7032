"""The kinds of a definition's values, on which its kernels depend, and copies with such values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spikefuse.neurons.definition import Neuron
from spikefuse.neurons.description import bind, read

# A parameter is a Python float, a 0-d tensor, or a tensor of one value per channel.
FLOAT, SCALAR, CHANNEL = "float", "scalar", "channel"
#: (name, kind) of every run-time value of a definition.
Kinds = tuple[tuple[str, str], ...]


def kinds_of(values: Mapping[str, float | Tensor]) -> Kinds:
    """The kinds of a definition's run-time values."""

    def kind(value: float | Tensor) -> str:
        if isinstance(value, float):
            return FLOAT
        return SCALAR if value.ndim == 0 else CHANNEL

    return tuple([(name, kind(value)) for name, value in values.items()])


def as_traced(definition: Neuron, kinds: Kinds, constants: Sequence[Any]) -> Neuron:
    """A definition as torch.compile sees it while it traces, when the definition itself still has
    the values from before the assignments that are traced; itself if there are none.

    Args:
        kinds, constants: of the values that are traced.

    Raises:
        TypeError: a constant has become a run-time value.
    """
    pairs = zip(definition.constant_names(), constants, strict=True)
    changed = {name: value for name, value in pairs if _differ(read(definition, name), value)}
    if not changed and kinds == kinds_of(definition.values()):
        return definition
    copy = skeleton(definition, kinds)
    for name, value in changed.items():
        if isinstance(value, float | Tensor):
            raise TypeError(
                f"the captured network assigns a {type(value).__name__} to '{name}' of a "
                f"{type(definition).__name__}, a constant before, {read(definition, name)!r}: "
                "assign one before the call"
            )
        prefix, _, attribute = name.rpartition(".")
        vars(copy.get_submodule(prefix))[attribute] = value
    return copy


def _differ(known: Any, traced: Any) -> bool:
    """Whether a constant has been assigned. TorchDynamo has objects of its own for others, such as
    methods and the numbers of NumPy."""
    if not isinstance(known, bool | int | str | tuple | None):
        return False
    return type(known) is not type(traced) or repr(known) != repr(traced)


def skeleton(definition: Neuron, kinds: Kinds) -> Neuron:
    """A copy of a definition that holds none of its tensors, but others of the same dims.

    Args:
        kinds: of its values.
    """
    known = definition.values()
    values = {name: _placeholder(known.get(name), kind) for name, kind in kinds}
    copy = bind(definition, values)
    for module in copy.modules():
        # The description reads the tensors of the original; hooks may refer to anything.
        fresh = {key: value for key, value in vars(nn.Module()).items() if "hook" in key}
        module.__dict__.update(fresh, _description=None)
    return copy


def _placeholder(value: float | Tensor | None, kind: str) -> float | Tensor:
    """A value of this kind, like `value` if that is of the kind, too."""
    if kind == FLOAT:
        return value if isinstance(value, float) else 1.0
    ndim = value.ndim if isinstance(value, Tensor) else 0
    return torch.zeros((2,) * (max(ndim, 1) if kind == CHANNEL else 0))
