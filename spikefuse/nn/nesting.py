"""Values in tuples, lists and dicts of any nesting. Named tuples, PyTorch's `return_types` and
subclasses of dict keep their types; other subclasses are values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from torch import Tensor


def _is_sequence(tree: Any) -> bool:
    kind = type(tree)
    # PyTorch's `return_types` have `n_fields`.
    return kind in (tuple, list) or (
        isinstance(tree, tuple) and (hasattr(kind, "_fields") or hasattr(kind, "n_fields"))
    )


def map_values(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree like `tree` with `function(value)` in place of each value."""
    kind = type(tree)
    if _is_sequence(tree):
        values = [map_values(function, value) for value in tree]
        if kind is list:
            return values
        return kind(*values) if hasattr(kind, "_fields") else kind(values)
    if isinstance(tree, dict):
        if kind is dict:
            return {key: map_values(function, value) for key, value in tree.items()}
        result = copy.copy(tree)
        for key, value in tree.items():
            result[key] = map_values(function, value)
        return result
    return function(tree)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return a tree like `tree` with `function(x)` in place of each tensor."""
    if isinstance(tree, Tensor):
        return function(tree)
    return map_values(lambda x: function(x) if isinstance(x, Tensor) else x, tree)


def named_values(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value with its place, such as "[0]['mask']"."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from named_values(value, f"{path}[{key!r}]")
    elif _is_sequence(tree):
        for i, value in enumerate(tree):
            yield from named_values(value, f"{path}[{i}]")
    else:
        yield path, tree


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the values of a tree, and a tree of as many None."""
    values: list[Any] = []
    return values, map_values(values.append, tree)


def unflatten(values: Iterable[Any], structure: Any) -> Any:
    """Return the tree of which `flatten` has returned values and structure."""
    rest = iter(values)
    return map_values(lambda _: next(rest), structure)


def key_of(structure: Any) -> Hashable:
    """Return what tells a structure from others."""
    if isinstance(structure, dict):
        return type(structure), *((key, key_of(value)) for key, value in structure.items())
    if _is_sequence(structure):
        return type(structure), *map(key_of, structure)
    return None
