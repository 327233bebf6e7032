"""What a neuron model is: named states, parameters, and one time step.

A definition says nothing about time loops, kernels or devices. The eager loop
(`spikefuse.reference`) and the compiler both run `step` on a *bound* copy, in which every
parameter is a tensor, so that they see the same arithmetic.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from spikefuse.neurons.parameters import Holder, Learnable
from spikefuse.neurons.parameters import number as number

Outputs = tuple[Tensor, ...]
States = tuple[Tensor, ...]


class State:
    """A variable that a neuron carries from one time step to the next.

    Declared on the class (`v = State()`); `step` receives the states after its inputs, in the
    order of their declaration.

    Args:
        initial: value at rest, with which a sequence starts unless a state is passed in.
    """

    def __init__(self, initial: float = 0.0) -> None:
        self.initial = float(initial)


_D = TypeVar("_D", bound="Definition")


class Definition(Holder):
    """Base of all neuron models: states as class attributes, parameters in `__init__`, a `step`.

    Attributes by kind:

    - `float`, 0-d tensor, 1-d tensor of one value per channel, `nn.Parameter`: run-time float32
      values. Changing one compiles nothing. In `step` they are tensors, so they cannot steer
      Python control flow.
    - `bool`, `int`, `str`, `None`, tuples of these, and what stands on the class (`leak = 0.5`)
      unless the neuron has an attribute of that name: part of the definition. `step` may branch
      on them; a new value compiles a new kernel.
    """

    def step(self, *args: Any) -> Any:
        """One time step: `step(self, x, ..., v, ...)`, inputs first, then the states.

        Returns the output, or a tuple of outputs, and the tuple of new states. Every operation
        must be pointwise.

        Raises (when the class is made):
            TypeError: the last arguments are not the declared states, or `v = State` was written
                for `v = State()`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define step(self, x, ...)")

    #: The declared states by name, those of base classes first.
    states: ClassVar[dict[str, State]] = {}
    #: Names of the inputs: the arguments of `step` that come before the states.
    input_names: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, value in vars(cls).items():
            if value is State:
                raise TypeError(f"{cls.__name__}.{name} is the class State: write State()")
        bases = reversed(cls.__mro__)
        cls.states = {n: s for base in bases for n, s in vars(base).items() if isinstance(s, State)}
        if cls.step is not Definition.step:
            cls.input_names = _input_names(cls)

    def describe(self) -> tuple[dict[str, float | Tensor], tuple[Any, ...]]:
        """(values, statics) of this neuron.

        Values: every run-time value by dotted name: floats, tensors and the learnable ones.
        Statics: what the traced step depends on besides: types and constants; hashable.
        Both are for reading: later calls share them.
        """
        if torch.compiler.is_compiling():
            names, statics = self._inventory()
            return _computed(_read(self, names)), statics
        description = self.description()
        return description.values(), description.statics

    def description(self) -> Description:
        """The last description if nothing has changed since, else a new one; in eager mode only."""
        known: Description | None = self.__dict__.get("_known")
        if known is None or not known.holds(self):
            known = Description(self)
            self.__dict__["_known"] = known if known.may_be_kept else None
        return known

    def _inventory(self) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """(names of the values, statics)."""
        names: list[str] = []
        statics: list[Any] = []
        for prefix, module in _owners(self):
            statics.append((prefix, type(module)))
            for name, space in _class_constants(module):
                statics.append((name, _constant(type(module).__name__, name, space[name])))
            for name, value in _attributes(module):
                if isinstance(value, float | Tensor | Learnable):
                    names.append(prefix + name)
                elif not isinstance(value, nn.Module):
                    statics.append((name, _constant(type(module).__name__, name, value)))
        return tuple(names), tuple(statics)

    def evaluate(self, function: Callable[..., Any], *constants: Any) -> Any:
        """`function(self, *constants)`, of which torch.compile keeps the result."""
        return function(self, *constants)

    # What torch.compiler.assume_constant_result would set, after importing all of torch.compile.
    for _method in (_inventory, evaluate):
        setattr(_method, "_dynamo_marked_constant", True)  # noqa: B010
    del _method

    def values(self) -> dict[str, float | Tensor]:
        """Every run-time value by dotted name."""
        return self.describe()[0]

    def bind(self: _D, values: Mapping[str, Tensor]) -> _D:
        """A shallow copy whose run-time values are `values` (by dotted name)."""
        return _bind(self, values, "")


def _input_names(cls: type[Definition]) -> tuple[str, ...]:
    names = tuple(inspect.signature(cls.step).parameters)[1:]
    states = tuple(cls.states)
    inputs = names[: len(names) - len(states)]
    if names != inputs + states or not inputs:
        raise TypeError(
            f"{cls.__name__}.step takes ({', '.join(names)}), but the states declared are "
            f"({', '.join(states)}): write step(self, x, {', '.join(states)}), with at least "
            "one input and the states last, in the order of their declaration"
        )
    return inputs


def _owners(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The definition and its parts (surrogates), each with the prefix of its values' names."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and not isinstance(child, Learnable):
            yield from _owners(child, f"{prefix}{name}.")


# Attributes of every nn.Module, less `training`, on which a step may depend; and notes of ours.
_NOT_OURS = (set(vars(nn.Module())) - {"training"}) | {"_seen", "_known"}


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name not in _NOT_OURS:
            yield name, value
    for group in (module._parameters, module._buffers, module._modules):
        for name, value in group.items():
            if value is not None:
                yield name, value


# What of a class is read as a constant; functions and types there are methods and helpers.
_OF_CLASSES = (bool, int, float, str, type(None), Enum, torch.dtype)
_BASES = {nn.Module, Holder, object}


def _classes(module: nn.Module) -> Iterator[type]:
    return (cls for cls in type(module).__mro__ if cls not in _BASES)


def _class_constants(module: nn.Module) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The constants of a module's class that no attribute of its own hides, and their classes."""
    hidden = {"states", "input_names", *(name for name, _ in _attributes(module))}
    for cls in _classes(module):
        for name, value in vars(cls).items():
            if name not in hidden and not name.startswith("__"):
                hidden.add(name)
                if isinstance(value, (*_OF_CLASSES, *_CONTAINERS)):
                    yield name, vars(cls)


# What a static attribute may be besides containers of these: things that don't change.
_CONSTANTS = (
    *(bool, int, float, str, type(None), type, Enum, torch.dtype),
    *(FunctionType, BuiltinFunctionType),
)
_CONTAINERS = tuple, list, set, frozenset, dict


def _constant(owner: str, name: str, value: Any) -> Any:
    """A static attribute as part of a key, by its value."""
    if isinstance(value, int | float) and not isinstance(value, Enum):
        return type(value), repr(value)  # which tells True from 1, and -0.0 from 0.0
    if isinstance(value, _CONSTANTS):
        return value
    if isinstance(value, _CONTAINERS):
        items = value.items() if isinstance(value, dict) else value
        return type(value), tuple(_constant(owner, f"{name}[...]", item) for item in items)
    raise TypeError(
        f"{owner}.{name} is a {type(value).__name__}: a kernel can't tell when it changes; use "
        "floats and tensors for values, and bools, ints, strings or tuples of these for "
        "constants; for several tensors, use attributes, or an nn.ParameterList"
    )


def _read(definition: Definition, names: Iterable[str]) -> dict[str, Any]:
    """Attributes by their dotted names."""
    values = {}
    for name in names:
        value: Any = definition
        for part in name.split("."):
            value = getattr(value, part)
        values[name] = value
    return values


def _computed(values: dict[str, Any]) -> dict[str, float | Tensor]:
    return {n: value() if isinstance(value, Learnable) else value for n, value in values.items()}


class Description:
    """What `describe` has found, and the objects that it was found in: while a definition has
    those very objects, nothing has changed."""

    def __init__(self, definition: Definition) -> None:
        names, self.statics = definition._inventory()
        self._values = _read(definition, names)
        self._has_learnable = any(isinstance(v, Learnable) for v in self._values.values())
        #: What others have found out from this description.
        self.notes: dict[Hashable, Any] = {}
        # None stands for the definition, which a note of its own should not keep alive.
        self._parts: list[tuple[nn.Module | None, operator.itemgetter[Any]]] = [
            (module if prefix else None, _getter(module)) for prefix, module in _owners(definition)
        ]
        owners = [module for _, module in _owners(definition)]
        # Views of the classes: a constant of a class may be another, and there may be more.
        classes = dict.fromkeys(cls for module in owners for cls in _classes(module))
        self._spaces = list(map(vars, classes))
        self._constants = [found for module in owners for found in _class_constants(module)]
        self._found = self._objects(definition)
        objects = set(map(id, self._found))
        self.may_be_kept = not any(map(_may_change, self._found)) and all(
            id(value) in objects for value in self._values.values()
        )

    def values(self) -> dict[str, float | Tensor]:
        return _computed(self._values) if self._has_learnable else self._values

    def holds(self, definition: Definition) -> bool:
        try:
            objects = self._objects(definition)
        except KeyError:  # an attribute is gone
            return False
        return len(objects) == len(self._found) and all(map(operator.is_, objects, self._found))

    def _objects(self, definition: Definition) -> list[Any]:
        objects: list[Any] = [*map(len, self._spaces)]
        if self._constants:
            objects += [space[name] for name, space in self._constants]
        for part, getter in self._parts:
            module = definition if part is None else part
            own = module.__dict__
            parameters, buffers, modules, *values = getter(own)
            objects += (type(module), len(own) - ("_known" in own), *values)
            if parameters:
                objects += parameters
                objects += parameters.values()
            if buffers:
                objects += buffers
                objects += buffers.values()
            if modules:
                objects += modules
                objects += modules.values()
        return objects

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # copies find out for themselves


def _getter(module: nn.Module) -> operator.itemgetter[Any]:
    ours = (name for name in vars(module) if name not in _NOT_OURS)
    return operator.itemgetter("_parameters", "_buffers", "_modules", *ours)


def _may_change(value: Any) -> bool:
    """Whether a value can become another while it stays the same object."""
    if isinstance(value, tuple | frozenset):
        return any(map(_may_change, value))
    if isinstance(value, Tensor):
        return value.grad_fn is not None  # and to keep it would keep its graph
    return not isinstance(value, (*_CONSTANTS, nn.Module))


def _bind(module: Any, values: Mapping[str, Tensor], prefix: str) -> Any:
    clone = object.__new__(type(module))
    clone.__dict__.update(module.__dict__)
    # Values become plain attributes, so that neither nn.Module nor autograd interferes.
    clone.__dict__.update(_parameters={}, _buffers={}, _modules={})
    for name, value in values.items():
        if name.startswith(prefix) and "." not in name[len(prefix) :]:
            clone.__dict__[name[len(prefix) :]] = value
    for name, child in module._modules.items():
        if child is not None and not isinstance(child, Learnable):
            clone._modules[name] = _bind(child, values, f"{prefix}{name}.")
    return clone


class WrongResult(TypeError):
    """What a step returned is no pair of outputs and new states."""


def call_step(
    definition: Definition, inputs: tuple[Tensor, ...], states: States
) -> tuple[Outputs, States]:
    """Run one step and return (outputs, states) as tuples.

    Raises:
        WrongResult: `step` returned something other than an output (or a tuple of outputs) and
            one tensor per declared state.
    """
    result = definition.step(*inputs, *states)
    name, expected = type(definition).__name__, tuple(definition.states)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], tuple)):
        wrong = f"it returned {type(result).__name__}"
        if isinstance(result, tuple) and len(result) == 2:
            wrong = f"its second item is a {type(result[1]).__name__}: write (v,)"
        raise WrongResult(
            f"{name}.step must return (output, (new {', new '.join(expected) or 'state'},)); "
            f"{wrong}"
        )
    outputs = result[0] if isinstance(result[0], tuple) else (result[0],)
    for value in (*outputs, *result[1]):
        if not isinstance(value, Tensor):
            raise WrongResult(f"{name}.step returned a {type(value).__name__} among its tensors")
    if len(result[1]) != len(expected):
        raise WrongResult(
            f"{name}.step returned {len(result[1])} new states, but {len(expected)} are declared "
            f"({', '.join(expected)})"
        )
    like = inputs[0]
    return tuple(_full(y, like) for y in outputs), tuple(_full(s, like) for s in result[1])


def _full(value: Tensor, like: Tensor) -> Tensor:
    """A result in the dtype and shape of the step: comparisons and parameters are results too."""
    value = value if value.dtype == like.dtype else value.to(like.dtype)
    return value if value.shape == like.shape else value.expand(like.shape)


def channel_view(name: str, value: Tensor, step_shape: torch.Size) -> Tensor:
    """A parameter shaped to broadcast over one step `[B, C, ...]`.

    Raises:
        ValueError: neither a scalar nor one value per channel.
    """
    if value.ndim == 0:
        return value
    if value.ndim != 1 or len(step_shape) < 2 or value.shape[0] != step_shape[1]:
        channels = step_shape[1] if len(step_shape) > 1 else "none"
        raise ValueError(
            f"parameter '{name}' has shape {list(value.shape)}: expected a scalar, or one value "
            f"per channel (dim 2 of [T, B, C, ...]; this input has C = {channels})"
        )
    return value.view(-1, *(1,) * (len(step_shape) - 2))
