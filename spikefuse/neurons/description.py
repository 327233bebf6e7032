"""What a compiled step depends on: the values and the constants of a neuron.

Values are floats, tensors and `Learnable` parameters; kernels take them as arguments. Everything
else is a constant of the source.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Generic

import numpy as np
import torch
from torch import Tensor, nn

from spikefuse._torch import children_of, registries
from spikefuse.neurons.learnable import Learnable
from spikefuse.neurons.parameters import (
    CHECKS,
    VERSION,
    Holder,
    is_own_method,
    registered,
    shallow_copy,
    versions,
)


class Cache(dict[Hashable, Any]):
    """A dictionary to which weak references may refer."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class Description:
    """The values and constants of a neuron, or of a surrogate.

    Floats change only by assignment, so they are cached. Tensors are read anew on every call:
    optimizers, `.to()` and `torch.func.functional_call` replace them directly.

    Attributes:
        versions, seen: the description is valid while they are equal.
        cache: results that depend only on the statics, the floats and the kinds of the tensors.
        tensors: dotted names of the values that are not floats.
        floats: all values by dotted name, None for those that are not floats.
        constants: names of the constants.
        unknown: why a step must not read an attribute whose changes cannot be detected, by name.
        statics: what the traced step depends on besides values: types and constants; hashable.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = list(owners(module))
        # Read first, so that no change by another thread is missed.
        self.versions = [v for _, m in modules if isinstance(m, Holder) for v in versions(m)]
        self.seen = [version.copy() for version in self.versions]
        self.cache = Cache()
        self.tensors: list[str] = []
        self.constants: list[str] = []
        self.unknown: dict[str, str] = {}
        self.floats: dict[str, Any] = {}
        statics: list[Any] = []
        for prefix, part in modules:
            constants = list(class_constants(part))
            for name, value in _attributes(part):
                if isinstance(value, Tensor | Learnable):
                    self.floats[prefix + name] = None
                    self.tensors.append(prefix + name)
                elif isinstance(value, float):
                    self.floats[prefix + name] = value
                elif not isinstance(value, nn.Module):
                    constants.append((name, value))
            statics.append((prefix, type(part), *_functions(part)))
            known = {}
            for name, value in constants:
                if is_own_method(part, value):
                    value = MethodType, value.__func__
                try:
                    statics.append((name, _constant(type(part).__name__, name, value)))
                    known[name] = value
                except TypeError as error:
                    self.unknown[prefix + name] = str(error)
                    if hasattr(type(part), name):  # which a step may read elsewhere
                        statics.append((name, "unknown"))
            self.constants += [prefix + name for name in known]
            if not _is_observed(part, known.values()):
                self.seen.clear()
        self.statics = tuple(statics)
        # Compared as text because -0.0 == 0.0.
        self.basis = self.statics, repr(self.floats)

    def values(self, module: nn.Module) -> dict[str, float | Tensor]:
        """Return every run-time value of `module`, which this describes, by dotted name; read-only,
        since later calls share it."""
        if not self.tensors:
            return self.floats
        values = self.floats.copy()
        for name in self.tensors:
            values[name] = read(module, name)
        return values

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # copies of the neuron start without a description


def read(module: nn.Module, name: str) -> Any:
    """Return the value or the constant of a dotted name."""
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    value = value() if isinstance(value, Learnable) else value
    is_single = isinstance(value, Tensor) and value.shape == (1,)
    return value.reshape(()) if is_single else value


def owners(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield a neuron and its submodules (surrogates), each with its prefix for names."""
    yield prefix, module
    for name, child in children_of(module).items():
        if not isinstance(child, Learnable):
            yield from owners(child, f"{prefix}{name}.")


# Attributes that no step reads: those of every nn.Module except `training`, and our own.
INTERNAL = (set(vars(nn.Module())) - {"training"}) | {
    *("_description", "_converted_from", CHECKS, VERSION),
}


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the attributes of a module by name: its own, parameters, buffers and submodules."""
    own = {name: value for name, value in vars(module).items() if name not in INTERNAL}
    own.update(registered(module))
    # A parameter or buffer that is None has a name only.
    others = set(dir(module)) - set(dir(type(module))) - INTERNAL - own.keys()
    return [*own.items(), *((name, None) for name in sorted(others))]


_CONTAINERS = tuple, list, set, frozenset, dict
# Immutable attributes.
_CONSTANTS = (
    *(bool, int, float, str, type(None), type, Enum, torch.dtype, torch.device),
    *(np.generic, FunctionType, ModuleType),
)
_BASES = {nn.Module, Holder, ABC, Generic, object}


def _classes(module: nn.Module) -> Iterator[type]:
    return (cls for cls in type(module).__mro__ if cls not in _BASES)


def class_constants(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the constants of a module's classes that no instance attribute hides."""
    states = getattr(type(module), "states", None)
    hidden = {
        "states",
        "input_names",
        "has_first_states",
        "_converted_from",
        *(states if isinstance(states, dict) else ()),
        *(name for name, _ in _attributes(module)),
    }
    for cls in _classes(module):
        for name, value in vars(cls).items():
            if name not in hidden and not name.startswith(("__", "_abc_")):
                hidden.add(name)
                if not _is_method(value):
                    yield name, value


def _functions(module: nn.Module) -> Iterator[Any]:
    """Yield the methods of a module's classes, which may be replaced."""
    for cls in _classes(module):
        yield from filter(_is_method, vars(cls).values())


def _is_method(value: Any) -> bool:
    """Whether an attribute of a class is a function of its instances, or a property."""
    is_hashable = isinstance(value, Hashable)
    return hasattr(type(value), "__get__") and is_hashable and not isinstance(value, partial)


def _constant(owner: str, name: str, value: Any) -> Any:
    """Return a static attribute as part of a key, compared by value."""
    if isinstance(value, int | float | np.generic) and not isinstance(value, Enum):
        return type(value), repr(value)  # distinguishes True from 1, and -0.0 from 0.0
    if _is_immutable(value):
        return value
    if isinstance(value, _CONTAINERS):
        items = value.items() if isinstance(value, dict) else value
        return type(value), tuple(_constant(owner, f"{name}[...]", item) for item in items)
    raise TypeError(
        f"{owner}.{name} is a {type(value).__name__}, whose changes cannot be detected: use floats "
        "and tensors for values, and bools, ints, strings or tuples of these for constants; for "
        "several tensors, use attributes, or an nn.ParameterList. Assign tensors and modules to "
        "the neuron in __init__, and write functions as methods"
    )


def _is_observed(module: nn.Module, constants: Iterable[Any]) -> bool:
    """Return whether every change of the constants and floats replaces a version.

    Modules that are not a `Holder`, and lists, sets and dicts, change unseen.
    """
    classes = (isinstance(cls, type(Holder)) for cls in _classes(module))
    mutable = any(map(_is_mutable, constants))
    return isinstance(module, Holder) and all(classes) and not mutable


def _is_mutable(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return any(map(_is_mutable, value))
    return not _is_immutable(value)


def _is_immutable(value: Any) -> bool:
    """Whether a value is a constant that is no container, or a method of a class, such as `apply`
    of a `torch.autograd.Function`, or of a module, such as `torch.sin`."""
    if isinstance(value, MethodType | BuiltinFunctionType):
        return isinstance(value.__self__, type | ModuleType | None)
    return isinstance(value, _CONSTANTS)


def bind(
    module: Any,
    values: Mapping[str, Any],
    prefix: str = "",
    as_class: Callable[[Any, str], Any] | None = None,
) -> Any:
    """Return a shallow copy whose run-time values are `values`, by dotted name.

    Args:
        as_class: returns the class of a copy for that of a module and its prefix.
    """
    cls = type(module)
    clone = shallow_copy(module, as_class(cls, prefix) if as_class else cls)
    # Values become plain attributes, so that neither nn.Module nor autograd interferes.
    clone.__dict__.update(registries())
    clone.__dict__.update((name, None) for name, value in _attributes(module) if value is None)
    for name, value in values.items():
        if name.startswith(prefix) and "." not in name[len(prefix) :]:
            clone.__dict__[name[len(prefix) :]] = value
    for name, child in children_of(module).items():
        if not isinstance(child, Learnable):
            copy = bind(child, values, f"{prefix}{name}.", as_class)
            nn.Module.add_module(clone, name, copy)
    return clone
