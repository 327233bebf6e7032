"""The contract of a neuron model: named states, parameters, and one time step.

A definition knows nothing about time loops, kernels or devices. The eager loop
(`spikefuse.reference`) and the compiler both run `step` on a *bound* copy, in which every
parameter is a tensor, so both see the same arithmetic.
"""

from __future__ import annotations

import inspect
from abc import ABC
from collections.abc import Callable, Hashable, Iterator, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from spikefuse.neurons import parameters
from spikefuse.neurons.learnable import Learnable
from spikefuse.neurons.parameters import Holder

Outputs = tuple[Tensor, ...]
States = tuple[Tensor, ...]


class State:
    """A variable that a neuron carries from one time step to the next.

    Declare states on the class (`v = State()`). `step` receives them after its inputs, in the
    order of declaration.

    Args:
        initial: value at rest, from which a sequence starts unless a state is passed in.
    """

    def __init__(self, initial: float = 0.0) -> None:
        self.initial = float(initial)


_N = TypeVar("_N", bound="Neuron")


class Neuron(Holder):
    """Base class of all neurons; subclass it to write your own.

    Declare states on the class, parameters in `__init__`, and one time step in `step`. The model is
    then fused over all time steps, forward and backward, on GPU and CPU.

    Attributes are of two kinds:

    - `float`, 0-d tensor, 1-d tensor of one value per channel, `nn.Parameter`, `Learnable`:
      run-time float32 values. A new value does not recompile. In `step` they are tensors, so they
      cannot steer Python control flow.
    - `bool`, `int`, `str`, `None`, tuples of these, and class attributes (`leak = 0.5`) that no
      instance attribute hides: constants. `step` may branch on them; a new value compiles a new
      kernel.

    Call: `neuron(x, ..., state=None, return_state=False, impl="auto", outputs=None)`

    Args:
        inputs: one or several tensors of one shape `[T, B, ...]`, float32, bfloat16 or float16.
            Dim 0 is time whatever the number of dims: `[B, F]` is read as B steps of F samples,
            and `x.unsqueeze(0)` as one step of B samples.
        state: one floating-point tensor `[B, ...]` per declared state, converted to float32, or
            None to start from rest.
        return_state: also return the final state, as a tuple of float32 tensors.
        impl: "auto" (Triton on a GPU, Numba on a CPU), "triton", "numba", or "reference" (the
            eager loop, any device, also float64).
        outputs: names of what to return over time, all of it differentiable: a declared state
            (its value after the step, for `LIF` after the reset), "spikes" for the output of
            `step`, or "output0", "output1", ... if it has several. An output takes precedence over
            a state of the same name. For example, for a loss on the membrane::

                spikes, v = sf.LIF()(x, outputs=("spikes", "v"))

    Returns:
        The output `[T, B, ...]` in the dtype of the inputs (a tuple if `step` has several, or with
        `outputs`), and with `return_state` a pair (output, state).

    Raises:
        TypeError, ValueError: inputs or states of the wrong dtype, shape or number, or `outputs`
            that the neuron does not have.
        UnsupportedOperation: `step` uses an operation that cannot be compiled.
    """

    #: Runs the neuron over time. `spikefuse.nn.neuron` assigns it: this package knows no kernels.
    forward: Callable[..., Any]

    def step(self, *args: Any) -> Any:
        """Compute one time step: `step(self, x, ..., v, ...)`, inputs first, then the states.

        Return the output, or a tuple of outputs, and the tuple of new states. Every operation
        must be pointwise.

        Raises (at class creation):
            TypeError: the last arguments are not the declared states, or `v = State` was written
                instead of `v = State()`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define step(self, x, ...)")

    #: Names of the outputs and new states that the step returns, none for its outputs.
    _selected: tuple[str, ...] = ()
    #: The declared states by name, those of base classes first.
    states: ClassVar[dict[str, State]] = {}
    #: Names of the inputs: the arguments of `step` before the states.
    input_names: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, value in vars(cls).items():
            if value is State:
                raise TypeError(f"{cls.__name__}.{name} is the class State: write State()")
        bases = reversed(cls.__mro__)
        cls.states = {n: s for base in bases for n, s in vars(base).items() if isinstance(s, State)}
        if cls.step is not Neuron.step:
            cls.input_names = _input_names(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self).states:
            raise AttributeError(
                f"{type(self).__name__}.{name} is a state, which starts at its initial value in "
                "every call: pass another value as state=(...), and get the last one by "
                "return_state=True"
            )
        super().__setattr__(name, value)

    def __prepare_scriptable__(self) -> Any:
        raise NotImplementedError(
            "torch.jit.script does not compile neurons: pass spikefuse.exportable(net) to "
            "torch.jit.trace"
        )

    def _replicate_for_data_parallel(self) -> Any:
        raise NotImplementedError(
            "nn.DataParallel splits dim 0 of its inputs, which is time: use "
            "torch.nn.parallel.DistributedDataParallel, with a process for each GPU"
        )

    def describe(self) -> tuple[dict[str, float | Tensor], tuple[Any, ...]]:
        """Return (values, statics); treat both as read-only, since later calls share them.

        Values: the run-time values by dotted name: floats, tensors, computed `Learnable` values.
        Statics: everything else that the traced step depends on (types and constants); hashable.
        """
        if torch.compiler.is_compiling():
            names, constants, _ = self._inventory()
            # Reading the constants as arguments lets torch.compile guard on them.
            statics = self.evaluate(_statics, *[_read(self, name) for name in constants])
            return {name: _read(self, name) for name in names}, statics
        description = self.description()
        return description.values(), description.statics

    def description(self) -> Description:
        """Return the cached description, or a new one after any attribute assignment. Eager only.

        Modules that are not a `Holder`, and lists, sets and dicts, change without an assignment
        that can be observed: definitions with those are described anew in every call.
        """
        known: Description | None = self.__dict__.get("_known")
        if known is not None and known.epoch is parameters.epoch:
            return known
        description = Description(self)
        if known is not None and known.basis == description.basis:
            description.cache = known.cache
        self.__dict__["_known"] = description if _is_observed(self) else None
        return description

    def _inventory(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[Any, ...]]:
        """Return (names of the values, names of the constants, statics)."""
        names: list[str] = []
        constants: list[str] = []
        statics: list[Any] = []
        for prefix, module in owners(self):
            found = list(class_constants(module))
            for name, value in _attributes(module):
                if isinstance(value, float | Tensor | Learnable):
                    names.append(prefix + name)
                elif not isinstance(value, nn.Module):
                    found.append((name, value))
            constants += [prefix + name for name, _ in found]
            statics.append((prefix, type(module), *_functions(module)))
            statics += [(n, _constant(type(module).__name__, n, value)) for n, value in found]
        return tuple(names), tuple(constants), tuple(statics)

    def evaluate(self, function: Callable[..., Any], *constants: Any) -> Any:
        """Return `function(self, *constants)`, which torch.compile treats as a constant.

        It guards on the arguments only, not on what `function` reads of the definition.
        """
        return function(self, *constants)

    # The effect of torch.compiler.assume_constant_result, which would import all of torch.compile.
    for _method in (_inventory, evaluate):
        setattr(_method, "_dynamo_marked_constant", True)  # noqa: B010
    del _method

    def values(self) -> dict[str, float | Tensor]:
        """Return every run-time value by dotted name."""
        return self.describe()[0]

    def bind(self: _N, values: Mapping[str, Tensor]) -> _N:
        """Return a shallow copy whose run-time values are `values` (by dotted name)."""
        return _bind(self, values, "")


def _input_names(cls: type[Neuron]) -> tuple[str, ...]:
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


class Description:
    """The values and statics of a definition, valid until an attribute is assigned.

    Floats change only by assignment, so they are cached. Tensors are read anew on every call:
    optimizers, `.to()` and `torch.func.functional_call` replace them directly.
    """

    def __init__(self, definition: Neuron) -> None:
        self.epoch = parameters.epoch
        names, _, self.statics = definition._inventory()
        #: Results that depend only on the statics, the floats and the kinds of the tensors.
        self.cache: dict[Hashable, Any] = {}
        self._values: dict[str, Any] = {}
        #: Name, and where to read it, of each value that is not a float.
        self.tensors: list[tuple[str, dict[str, Any], str]] = []
        for name in names:
            group, key = _locate(definition, name)
            is_float = isinstance(group[key], float)
            self._values[name] = group[key] if is_float else None
            if not is_float:
                self.tensors.append((name, group, key))
        # Compared as text because -0.0 == 0.0.
        self.basis = self.statics, repr(self._values)

    def values(self) -> dict[str, float | Tensor]:
        if not self.tensors:
            return self._values
        values = self._values.copy()
        for name, group, key in self.tensors:
            value = group[key]
            values[name] = value() if isinstance(value, Learnable) else value
        return values

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # copies of the definition start without a description


def _statics(definition: Neuron, *constants: Any) -> tuple[Any, ...]:
    return definition._inventory()[2]


def _read(definition: Neuron, name: str) -> Any:
    value: Any = definition
    for part in name.split("."):
        value = getattr(value, part)
    return value() if isinstance(value, Learnable) else value


def _locate(definition: Neuron, name: str) -> tuple[dict[str, Any], str]:
    """Return the dict of the module that holds the value `name`, and its key there."""
    *path, key = name.split(".")
    module: Any = definition
    for part in path:
        module = module._modules[part]
    groups = module._parameters, module._buffers, module._modules
    return next((group for group in groups if key in group), vars(module)), key


def owners(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the definition and its submodules (surrogates), each with its prefix for names."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and not isinstance(child, Learnable):
            yield from owners(child, f"{prefix}{name}.")


# Attributes that no step reads: those of every nn.Module except `training`, and the description.
INTERNAL = (set(vars(nn.Module())) - {"training"}) | {"_known"}


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name not in INTERNAL:
            yield name, value
    for group in (module._parameters, module._buffers, module._modules):
        yield from group.items()


_CONTAINERS = tuple, list, set, frozenset, dict
# Class attributes of these types are constants; functions and types on a class are its methods.
_CLASS_CONSTANTS = (bool, int, float, str, type(None), Enum, torch.dtype, *_CONTAINERS)
# Immutable instance attributes.
_CONSTANTS = (
    *(bool, int, float, str, type(None), type, Enum, torch.dtype),
    *(FunctionType, BuiltinFunctionType),
)
_METHODS = FunctionType, staticmethod, classmethod, property
_BASES = {nn.Module, Holder, ABC, Generic, object}


def _classes(module: nn.Module) -> Iterator[type]:
    return (cls for cls in type(module).__mro__ if cls not in _BASES)


def class_constants(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the constants of a module's classes that no instance attribute hides."""
    hidden = {"states", "input_names", *(name for name, _ in _attributes(module))}
    for cls in _classes(module):
        for name, value in vars(cls).items():
            if name not in hidden and not name.startswith("__"):
                hidden.add(name)
                if isinstance(value, _CLASS_CONSTANTS):
                    yield name, value


def _functions(module: nn.Module) -> Iterator[Any]:
    """Yield the methods of a module's classes, which may be replaced."""
    for cls in _classes(module):
        yield from [value for value in vars(cls).values() if isinstance(value, _METHODS)]


def _constant(owner: str, name: str, value: Any) -> Any:
    """Return a static attribute as part of a key, compared by value."""
    if isinstance(value, int | float) and not isinstance(value, Enum):
        return type(value), repr(value)  # distinguishes True from 1, and -0.0 from 0.0
    if isinstance(value, _CONSTANTS):
        return value
    if isinstance(value, _CONTAINERS):
        items = value.items() if isinstance(value, dict) else value
        return type(value), tuple(_constant(owner, f"{name}[...]", item) for item in items)
    raise TypeError(
        f"{owner}.{name} is a {type(value).__name__}, whose changes cannot be detected: use floats "
        "and tensors for values, and bools, ints, strings or tuples of these for constants; for "
        "several tensors, use attributes, or an nn.ParameterList"
    )


def _is_observed(definition: Neuron) -> bool:
    """Return whether every change of the definition's statics and floats replaces the epoch."""
    for _, module in owners(definition):
        classes = (isinstance(cls, type(Holder)) for cls in _classes(module))
        if not (isinstance(module, Holder) and all(classes)):
            return False
        values = [*vars(module).items(), *class_constants(module)]
        if any(_is_mutable(value) for name, value in values if name not in INTERNAL):
            return False
    return True


def _is_mutable(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return any(map(_is_mutable, value))
    return not isinstance(value, _CONSTANTS)


def _bind(module: Any, values: Mapping[str, Tensor], prefix: str) -> Any:
    clone = object.__new__(type(module))
    clone.__dict__.update(module.__dict__)
    # Values become plain attributes, so that neither nn.Module nor autograd interferes.
    clone.__dict__.update(_parameters={}, _buffers={}, _modules={})
    clone.__dict__.update((name, None) for name, value in _attributes(module) if value is None)
    for name, value in values.items():
        if name.startswith(prefix) and "." not in name[len(prefix) :]:
            clone.__dict__[name[len(prefix) :]] = value
    for name, child in module._modules.items():
        if child is not None and not isinstance(child, Learnable):
            clone._modules[name] = _bind(child, values, f"{prefix}{name}.")
    return clone


class WrongResult(TypeError):
    """A step did not return a pair of outputs and new states."""


class UnknownOutput(ValueError):
    """A name is neither that of an output nor that of a state."""


#: Names the first output of any definition, see `with_outputs`.
FIRST_OUTPUT = "output0"


def with_outputs(definition: _N, names: tuple[str, ...]) -> _N:
    """Return a copy, with the same tensors, whose step returns these outputs and new states;
    without names, the definition itself."""
    if not names:
        return definition
    clone = object.__new__(type(definition))
    clone.__dict__.update(definition.__dict__, _known=None, _selected=names)
    return clone


def _select(definition: Neuron, outputs: Outputs, states: States) -> Outputs:
    """Return the selected outputs and new states."""
    labels = [f"output{i}" for i in range(len(outputs))]
    known = dict(zip((*definition.states, *labels), (*states, *outputs), strict=True))
    if len(outputs) == 1:
        labels, known["spikes"] = ["spikes"], outputs[0]
    for name in definition._selected:
        if name not in known:
            valid = ", ".join(map(repr, dict.fromkeys((*labels, *definition.states))))
            raise UnknownOutput(
                f"no output or state is named {name!r}: expected names among {valid}"
            )
    return tuple(known[name] for name in definition._selected)


def call_step(
    definition: Neuron, inputs: tuple[Tensor, ...], states: States
) -> tuple[Outputs, States]:
    """Run one step and return (outputs, states) as tuples.

    Raises:
        WrongResult: `step` did not return an output (or a tuple of outputs) and a tuple with one
            tensor per declared state.
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
    if definition._selected:
        outputs = _select(definition, outputs, result[1])
    like = inputs[0]
    return tuple(_like(y, like) for y in outputs), tuple(_like(s, like) for s in result[1])


def _like(value: Tensor, like: Tensor) -> Tensor:
    """Convert a result, which may be a comparison or a parameter, to the step's dtype and shape."""
    value = value if value.dtype == like.dtype else value.to(like.dtype)
    # Pointwise results have the shape of the inputs, or fewer dims. A trace of torch.jit knows the
    # number of dims, but not the shape.
    return value if value.ndim == like.ndim else value.expand(like.shape)


def channel_view(name: str, value: Tensor, step_shape: torch.Size) -> Tensor:
    """Reshape a parameter to broadcast over one step `[B, C, ...]`.

    Raises:
        ValueError: neither a scalar nor one value per channel.
    """
    if value.ndim == 0:
        return value
    fits = value.ndim == 1 and len(step_shape) > 1
    is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined]
    if not fits or (not is_traced and value.shape[0] != step_shape[1]):
        channels = step_shape[1] if len(step_shape) > 1 else "none"
        raise ValueError(
            f"parameter '{name}' has shape {list(value.shape)}: expected a scalar, or one value "
            f"per channel (dim 2 of [T, B, C, ...]; this input has C = {channels})"
        )
    return value.view(-1, *(1,) * (len(step_shape) - 2))
