"""What the converters of all libraries share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from spikefuse._torch import separate
from spikefuse.neurons.definition import Neuron
from spikefuse.neurons.learnable import Learnable
from spikefuse.neurons.surrogate import Surrogate
from spikefuse.nn.call import active

#: How a module is called: with all time steps, `[T, B, ...]`; once per step, `[B, ...]`; or, a
#: stateless one, once with all steps folded into the batch, `[T*B, ...]`.
SEQUENCE, STEP, FOLDED = "sequence", "step", "folded"

#: Names of layers of torch.nn that have no state and take one step, `[B, ...]`.
STATELESS = (
    *(f"{kind}{n}d" for kind in ("Conv", "ConvTranspose", "BatchNorm") for n in (1, 2, 3)),
    *(f"{kind}Pool{n}d" for kind in ("Max", "Avg", "AdaptiveAvg") for n in (1, 2, 3)),
    *("Linear", "Flatten", "GroupNorm", "Upsample"),
)


class Refusal(Exception):
    """Why a module is not converted, and what to do instead."""


@dataclass(frozen=True)
class Rule:
    """How a class is converted.

    Attributes:
        make: returns the converted module, and a note for the user or "". Of a container, it gets
            a copy with converted children.
        inside: how the children of a container are called; "" for other modules.
        is_stateful: whether the module has a state, so that it may run once per step only.
    """

    make: Callable[[Any], tuple[nn.Module, str]]
    inside: str = ""
    is_stateful: bool = False


@dataclass(frozen=True)
class Library:
    """The rules of a library.

    Attributes:
        name: of its package.
        rules: by class name.
        refused: why classes without a rule have none, by class name.
        mode: how a module of the library is called; "" if it takes both a step and a sequence.
        returns_state: whether a neuron returns its state beside its output.
        networks: subpackages whose classes are networks, not layers.
        mixins: base classes without code of their own.
    """

    name: str
    rules: Mapping[str, Rule]
    refused: Mapping[str, str]
    mode: Callable[[nn.Module], str]
    returns_state: Callable[[nn.Module], bool] = lambda module: False
    networks: tuple[str, ...] = ()
    mixins: tuple[str, ...] = ()

    def class_of(self, module: nn.Module) -> type | None:
        """Return the first class of the module's classes that is one of the library's layers."""
        for cls in type(module).__mro__:
            path = cls.__module__.split(".")
            is_ours = path[0] == self.name and not set(path) & set(self.networks)
            if is_ours and cls.__name__ not in self.mixins:
                return cls
        return None

    def name_of(self, module: nn.Module) -> str:
        """Return the name of that class."""
        cls = self.class_of(module)
        return "" if cls is None else cls.__name__


_M = TypeVar("_M", bound=nn.Module)


def as_class(kind: type[_M], module: nn.Module) -> _M:
    """Return the same module, with its parameters, buffers, hooks and modes, as one of `kind`."""
    made = kind.__new__(kind)
    # Without what torch.compile has made of it.
    vars(made).update(module.__getstate__())
    separate(made)
    return made


def rename(
    module: nn.Module, names: Mapping[str, str], constants: Mapping[str, Tensor] | None = None
) -> None:
    """Give the state dict of a module the names of the one that it was converted from.

    Args:
        names: theirs by ours.
        constants: what their state dict holds and the module does not. Other values don't load.
    """
    given = dict(names), dict(constants or {})
    module.register_state_dict_post_hook(partial(_save, *given))
    module.register_load_state_dict_pre_hook(partial(_load, *given))


def _save(
    names: dict[str, str],
    constants: dict[str, Tensor],
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
) -> None:
    for ours, theirs in names.items():
        state[prefix + theirs] = state.pop(prefix + ours)
    state.update({prefix + name: value for name, value in constants.items()})


def _load(
    names: dict[str, str],
    constants: dict[str, Tensor],
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    *options: Any,
) -> None:
    *_, errors = options  # after the metadata, strict, and the missing and unexpected keys
    for ours, theirs in names.items():
        if prefix + theirs in state:
            state[prefix + ours] = state.pop(prefix + theirs)
    for name, expected in constants.items():
        value = state.pop(prefix + name, expected)
        if not torch.equal(value.to(expected), expected):
            errors.append(
                f"{prefix}{name} is {value}: expected {expected}, the value when the neuron was "
                "converted; convert a model with the other value"
            )


def counted_from(name: str, v: float) -> str:
    """Return the note on a neuron that starts and rests at `v`, from which its potential counts."""
    return f"its potential is counted from {name} = {v:g}" if v else ""


class Clamped(Learnable):
    """A value clamped to [0, 1]."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        if isinstance(value, nn.Parameter):
            self.value = value
        else:
            self.register_buffer("value", value)

    def forward(self) -> Tensor:
        return self.value.clamp(0, 1)


class Above(Surrogate):
    """Fire above the threshold, not at it, with the derivative of the surrogate `inner`."""

    def __init__(self, inner: Surrogate) -> None:
        super().__init__(inner.cutoff)
        self.inner = inner

    def spike(self, u: Tensor) -> Tensor:
        return u > 0

    def derivative(self, u: Tensor) -> Tensor:
        return self.inner.derivative(u)

    def primal(self, u: Tensor) -> Tensor:
        return self.inner.primal(u)

    def tangent(self, u: Tensor) -> Tensor:
        return self.inner.tangent(u)

    def learns(self, name: str) -> bool:
        return self.inner.learns(name.removeprefix("inner."))


def begin_call(network: nn.Module, args: Any) -> None:
    """Forward pre-hook of a converted network that takes sequences."""
    neurons = (module for module in network.modules() if isinstance(module, Neuron))
    active.called = dict.fromkeys(neurons, False)


def end_call(network: nn.Module, args: Any, output: Any) -> None:
    """Forward hook of such a network, which also runs after an error."""
    active.called = {}
