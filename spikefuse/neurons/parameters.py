"""Checked parameters, and the module class that holds them and reports their changes."""

from __future__ import annotations

import inspect
import math
from abc import ABCMeta
from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from spikefuse._torch import children_of, registries
from spikefuse.neurons.checks import is_plain
from spikefuse.neurons.learnable import Learnable, as_text

#: What a parameter may be.
Value = float | Tensor | Learnable
NUMBERS = int, float, np.integer, np.floating
#: Returns the checked value of a parameter, given its name, a value, and bounds.
Check = Callable[..., Any]

#: A list of one object, which is replaced at every change.
Version = list[object]
#: The attribute of a `Holder` with its version, if anything depends on it.
VERSION = "_changes"
#: The attribute of a `Holder` with the checks of its parameters by name, each with its bounds.
CHECKS = "_checks"
#: The item of a pickled `Holder` with the functions of its own methods by name.
_METHODS = "_methods"
_class_versions: WeakKeyDictionary[type, Version] = WeakKeyDictionary()


def versions(holder: Holder) -> tuple[Version, Version]:
    """Return two lists that change when an attribute of `holder`, or of its class, is assigned or
    deleted. To find out later, compare them with copies."""
    own = holder.__dict__.setdefault(VERSION, [object()])
    return own, _class_versions.setdefault(type(holder), [object()])


def _changed(holder: Holder) -> None:
    version = holder.__dict__.get(VERSION)
    if version is not None:
        version[0] = object()


class _HolderType(ABCMeta):
    """Reports changes of class constants. Derives from `ABCMeta` to allow abstract holders."""

    def __new__(mcls, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> Any:
        if "__init__" in members:
            members["__init__"] = _explained(members["__init__"])
        return super().__new__(mcls, name, bases, members)

    # Virtual subclasses are not supported: the ordinary check is faster.
    __instancecheck__ = type.__instancecheck__

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        _class_changed(cls)

    def __delattr__(cls, name: str) -> None:
        super().__delattr__(name)
        _class_changed(cls)


def _explained(init: Callable[..., None]) -> Callable[..., None]:
    """Let a constructor raise an error that lists its options for one that it does not have."""
    known = inspect.signature(init).parameters
    takes_any = any(p.kind == p.VAR_KEYWORD for p in known.values())

    @wraps(init)
    def constructor(self: Any, *args: Any, **values: Any) -> None:
        for name in values:
            if name not in known and not takes_any:
                offered = ", ".join(options(type(self))[0])
                hint = f". {self._option_hint}" if self._option_hint else ""
                raise TypeError(
                    f"{type(self).__name__} has no option '{name}'; its options are {offered}{hint}"
                )
        init(self, *args, **values)

    return constructor


def _class_changed(cls: type) -> None:
    for kind, version in list(_class_versions.items()):
        if cls in kind.__mro__:
            version[0] = object()


class Holder(nn.Module, metaclass=_HolderType):
    """Base of neurons and surrogates.

    Tensors assigned to attributes become buffers: `.to()` moves them and `state_dict()` includes
    them. A value of any kind may replace a value of another kind.
    """

    #: Is added to the error for an unknown option.
    _option_hint: ClassVar[str] = ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def extra_repr(self) -> str:
        """Return the parameters as `name=value`, in the order of the constructor's arguments.

        Flags that are off are omitted, and so are defaults of base classes that the constructor
        does not offer.
        """
        offered, inherited = options(type(self))
        values = {**vars(self), **registered(self)}
        names = dict.fromkeys((*filter(values.__contains__, offered), *values))
        shown = [
            f"{name}={_as_text(value)}"
            for name, value in ((n, values[n]) for n in names)
            if not (name.startswith("_") or name == "training" or value is None or value is False)
            and not (isinstance(value, float | str) and value == inherited.get(name))
        ]
        return ", ".join(shown)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__dict__":  # by copies of parametrized modules, before anything else
            super().__setattr__(name, value)
            return
        if "training" not in vars(self):
            raise AttributeError(
                f"{type(self).__name__}.{name} is set too early: call super().__init__() first"
            )
        if name == "training" and value is self.training:
            return  # train() and eval() assign it to every module
        if name in (checks := vars(self).get(CHECKS, {})):
            check, *bounds = checks[name]
            value = check(name, value, *bounds)
        if isinstance(value, np.floating):
            value = float(value)
        is_buffer = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        if not (value is None or isinstance(value, Tensor)) and self._has_buffer(name):
            delattr(self, name)
        super().__setattr__(name, value)
        if is_buffer and name in vars(self):
            del vars(self)[name]
            self.register_buffer(name, value)
        _changed(self)

    def __getstate__(self) -> dict[str, Any]:
        # A method is pickled as the name of its function, by which a copy would find another one.
        own = {n: v.__func__ for n, v in vars(self).items() if is_own_method(self, v)}
        state: dict[str, Any] = super().__getstate__()  # type: ignore[misc, unused-ignore]
        return {n: v for n, v in state.items() if n not in own} | ({_METHODS: own} if own else {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = {n: MethodType(f, self) for n, f in state.get(_METHODS, {}).items()}
        super().__setstate__({n: v for n, v in state.items() if n != _METHODS} | own)

    def _option(self, name: str, value: Any, check: Check, *bounds: Any) -> Any:
        """Return an argument of the constructor, and let each assignment to the attribute `name`
        store what `check(name, value, *bounds)` returns. A check that a subclass names first is
        kept: it passes the value on to the constructor of its base class."""
        vars(self).setdefault(CHECKS, {}).setdefault(name, (check, *bounds))
        return value

    def _has_buffer(self, name: str) -> bool:
        if name in vars(self) or hasattr(type(self), name):
            return False
        value = getattr(self, name, False)
        return value is None or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter))

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        _changed(self)

    def register_buffer(self, *args: Any, **kwargs: Any) -> None:
        super().register_buffer(*args, **kwargs)
        _changed(self)

    def register_parameter(self, *args: Any, **kwargs: Any) -> None:
        super().register_parameter(*args, **kwargs)
        _changed(self)

    def add_module(self, *args: Any, **kwargs: Any) -> None:
        super().add_module(*args, **kwargs)
        _changed(self)


def is_own_method(module: nn.Module, value: Any) -> bool:
    """Whether an attribute of a module is a method that is bound to the module itself."""
    return isinstance(value, MethodType) and value.__self__ is module


def shallow_copy(module: Any, cls: type | None = None) -> Any:
    """Return a copy that shares the attributes, but whose own methods are bound to the copy.

    Args:
        cls: the class of the copy; by default that of the module.
    """
    clone: Any = object.__new__(cls or type(module))
    for name, value in module.__dict__.items():
        own = is_own_method(module, value)
        clone.__dict__[name] = MethodType(value.__func__, clone) if own else value
    return clone


def registered(module: nn.Module) -> dict[str, Any]:
    """Return the parameters, buffers and submodules of a module by name."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    buffers = module.named_buffers(recurse=False, remove_duplicate=False)
    return {**dict(parameters), **dict(buffers), **children_of(module)}


def evaluated(module: Any) -> Any:
    """Return a shallow copy with the value of each `Learnable`; torch.compile can trace this."""
    clone = shallow_copy(module)
    clone.__dict__.update(registries())
    for name, value in registered(module).items():
        if isinstance(value, nn.Module) and not isinstance(value, Learnable):
            nn.Module.add_module(clone, name, evaluated(value))
        else:
            value = value() if isinstance(value, Learnable) else value
            nn.Module.register_buffer(clone, name, value)
    return clone


def options(cls: type[Holder]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of a class's constructor, with those that it passes on to base classes,
    and the other arguments of its base classes: their defaults by name."""
    offered: dict[str, Any] = {}
    inherited: dict[str, Any] = {}
    found = offered
    for base in cls.__mro__[: cls.__mro__.index(Holder)]:
        init = vars(base).get("__init__")
        if init is not None:
            arguments = list(inspect.signature(init).parameters.values())[1:]
            named = [a for a in arguments if a.kind != a.VAR_KEYWORD and a.name not in offered]
            found.update({a.name: a.default for a in named})
            if not any(a.kind == a.VAR_KEYWORD for a in arguments):
                found = inherited
    return offered, inherited


def _as_text(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = "Parameter" if isinstance(value, nn.Parameter) else "tensor"
        return f"{kind}({as_text(value)})"
    return f"{value:g}" if isinstance(value, float) else repr(value)


def number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> Any:
    """Check a parameter: a finite float in [low, high], a tensor of such values or a `Learnable`.

    Raises:
        TypeError: not a number, a floating-point tensor or a `Learnable`.
        ValueError: not finite, or out of range.
    """
    expected = "a finite number" if math.isinf(low) else "a number in [{:g}, {:g}]"
    return _check(name, value, _is_between, expected, low, high)


def _is_between(x: Any, low: float, high: float) -> Any:
    return (abs(x) < math.inf) & (low <= x) & (x <= high)


def fraction(name: str, value: Any) -> Any:
    """Check a parameter as `number` does, in [0, 1]."""
    return number(name, value, 0.0, 1.0)


def positive(name: str, value: Any) -> Any:
    """Check a parameter as `number` does, greater than 0."""
    return _check(name, value, lambda x: (x > 0) & (x < math.inf), "a positive finite number")


def whole(name: str, value: Any, low: int) -> Any:
    """Check a parameter as `number` does, a whole number of at least `low`; as a float it becomes a
    run-time value."""
    return _check(name, value, lambda x, low: (x >= low) & (x % 1 == 0), "an integer >= {}", low)


def _check(
    name: str, value: Any, is_valid: Callable[..., Any], expected: str, *bounds: float
) -> Any:
    if isinstance(value, Learnable):
        return value
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            raise TypeError(f"{name} is a {value.dtype} tensor: expected a floating-point tensor")
        valid = not _is_known(value) or is_valid(value.detach(), *bounds).all()
    elif isinstance(value, bool) or not isinstance(value, NUMBERS):
        raise TypeError(f"{name} is {value!r}: expected a number, a tensor or a Learnable")
    else:
        valid = is_valid(float(value), *bounds)
    if not valid:
        raise ValueError(f"{name} is {value!r}: expected {expected.format(*bounds)}")
    return value if isinstance(value, Tensor) else float(value)


def _is_known(value: Tensor) -> bool:
    """Whether the values of a tensor can be read, which CUDA graphs and traces do not allow. Those
    of an `nn.Parameter` may leave their range in training, and are not looked at."""
    if isinstance(value, nn.Parameter):
        return False
    if torch.jit.is_tracing() or not is_plain((value,)):  # type: ignore[attr-defined]
        return False
    return not (value.is_cuda and torch.cuda.is_current_stream_capturing())


def flag(name: str, value: Any) -> bool:
    """Check a parameter that is True or False.

    Raises:
        TypeError: it is neither.
    """
    if not (isinstance(value, int | np.bool_) and value in (0, 1)):
        raise TypeError(f"{name} is {value!r}: expected True or False")
    return bool(value)


def one_of(name: str, value: Any, *known: str) -> Any:
    """Check a parameter that is one of the words `known`.

    Raises:
        ValueError: it is not.
    """
    if value not in known:
        raise ValueError(f"{name} is {value!r}: expected one of {', '.join(known)}")
    return value
