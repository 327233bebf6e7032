"""Modules as leaves of the graphs that torch.fx traces symbolically, as `prepare_fx` does."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from torch import fx, nn

F = TypeVar("F", bound=Callable[..., Any])


def leaf(forward: F) -> F:
    """Let a symbolic trace record calls of a module instead of its code."""

    @wraps(forward)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for x in args:
            if isinstance(x, fx.Proxy):
                target = x.tracer.path_of_module(self)  # type: ignore[attr-defined]
                return x.tracer.create_proxy("call_module", target, args, kwargs)
        return forward(self, *args, **kwargs)

    call.__signature__ = signature(forward)  # type: ignore[attr-defined]
    del call.__wrapped__  # torch.fx would read its code
    call.is_leaf = True  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def is_leaf(module: nn.Module) -> bool:
    """Whether a symbolic trace records calls of a module."""
    return getattr(type(module).forward, "is_leaf", False)
