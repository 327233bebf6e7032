"""Settings, of which the docstrings of their classes describe the options, and their checks."""

from __future__ import annotations

import difflib
import inspect
import os
import re
import reprlib
import shlex
import sys
from collections.abc import Callable
from dataclasses import field, fields
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

# Of whole numbers but the seed: what PyTorch and the libraries below it count in 32 bits.
COUNT_LIMIT = 2**31
# Magnitudes that float32, in which everything is computed, holds with a factor of 10 to spare.
SMALLEST, LARGEST = 1e-37, 1e37


class ConfigError(ValueError):
    """A setting is invalid; the one-line message names the setting and the fix."""


# A description of the allowed numbers, and a function that checks one.
Allowed = tuple[str, Callable[[float], bool]]
POSITIVE: Allowed = "a positive {}", lambda value: value > 0
NOT_NEGATIVE: Allowed = "a {} of at least 0", lambda value: value >= 0
BELOW_ONE: Allowed = "a {} above 0 and below 1", lambda value: 0 < value < 1
AT_LEAST_ONE: Allowed = "a {} of at least 1", lambda value: value >= 1


def between(low: float, high: float) -> Allowed:
    return f"a {{}} from {low:g} to {high:g}", lambda value: low <= value <= high


def up_to(high: float) -> Allowed:
    return f"a {{}} above 0, at most {high:g}", lambda value: 0 < value <= high


def option(default: Any, allowed: Any = None) -> Any:
    """Return a field for an option, a value of the type that the field is annotated with.

    Args:
        allowed: of numbers an `Allowed`, of text the choices, which are read when a value is
            checked, or None for any.
    """
    return field(default=default, metadata={"allowed": allowed})


@cache
def describe(options: type) -> dict[str, tuple[str, str]]:
    """Return what the docstring of a dataclass says of each option, and of its default.

    An entry ends in "; by default ..." where the default in the code does not say enough.
    """
    doc, described = inspect.getdoc(options) or "", {}  # without text under python -OO
    entries = dict(re.findall(r"^    (\w+): (.+(?:\n {5,}.+)*)", doc, re.M))
    for f in fields(options):
        entry = " ".join(entries.get(f.name, "").split()).removesuffix(".")
        text, _, default = entry.partition("; by default ")
        word = {True: "yes", False: "no"}[f.default] if isinstance(f.default, bool) else f.default
        described[f.name] = text, default or str(word)
    return described


@cache
def kinds(options: type) -> dict[str, Any]:
    """Return the type of each field of a dataclass for values other than None."""
    hints = get_type_hints(options)
    own = {name: get_args(h)[0] if isinstance(h, UnionType) else h for name, h in hints.items()}
    return {name: get_origin(hint) or hint for name, hint in own.items()}


def unknown(name: str, names: list[str]) -> str:
    """Say that there is no such option, and name the nearest one."""
    near = difflib.get_close_matches(name, names, 1)
    hint = f": did you mean {near[0]}?" if near else "; see spikefuse train --help"
    return f"unknown option {name!r}{hint}"


def check_fields(options: Any) -> None:
    """Check each value of a dataclass against the type, choices or range of its field."""
    owner: Any = type(options)
    own = kinds(owner)
    for f in fields(options):
        value = getattr(options, f.name)
        if value is not None or f.default is not None:
            check(f.name, value, own[f.name], f.metadata.get("allowed"))


# Names that an error lists.
_SHOWN = 20


def _shown(value: Any) -> str:
    """Return `repr(value)`, shortened if it is long."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    short.maxlevel = 2
    return short.repr(value)


def check(name: str, value: Any, kind: type, allowed: Any) -> None:
    """Raise ConfigError unless a value is of this kind, and `allowed` as in `option`."""
    if kind is str:
        if allowed is None and not isinstance(value, str):
            raise ConfigError(f"{name} is {_shown(value)}: expected a string")
        if allowed is not None and (not isinstance(value, str) or value not in allowed):
            word = value.lower() if isinstance(value, str) else ""
            begun = [name for name in allowed if word and name.startswith(word)]
            near = begun or difflib.get_close_matches(word, allowed, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            if name == "dataset" and word and (os.sep in value or os.path.isdir(value)):
                options = f"--dataset folder --data-dir {shlex.quote(value)}"
                hint = f"for images in a folder add {options} (for recordings --dataset events); "
            found = f"unknown {name} {_shown(value)}: {hint}"
            names = [*allowed][:_SHOWN]
            rest = f" or {len(allowed) - _SHOWN} others (--help)" if len(allowed) > _SHOWN else ""
            raise ConfigError(f"{found}choose one of {', '.join(names)}{rest}")
    elif kind is tuple:
        if not isinstance(value, tuple) or not all(type(entry) in (int, str) for entry in value):
            raise ConfigError(f"{name} is {_shown(value)}: expected a tuple")
    elif kind is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is {_shown(value)}: expected true or false")
    elif kind in (int, float):
        noun, types = ("whole number", int) if kind is int else ("number", int | float)
        text, accepts = allowed
        found = f"{name} is {_shown(value)}: expected"
        is_number = isinstance(value, types) and not isinstance(value, bool)
        if not is_number or (kind is float and not abs(value) <= sys.float_info.max):
            raise ConfigError(f"{found} a {noun}")
        if kind is float and not (value == 0 or SMALLEST <= abs(value) <= LARGEST):
            raise ConfigError(f"{found} a number from {SMALLEST:g} to {LARGEST:g}, or 0")
        if not accepts(value):
            raise ConfigError(f"{found} {text.format(noun)}")
        if kind is int and value >= COUNT_LIMIT and name != "seed":
            raise ConfigError(f"{found} a {noun} below {COUNT_LIMIT}")
