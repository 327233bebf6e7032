"""The modules that a step calls."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class _Thread(threading.local):
    modules: dict[nn.Module, None] | None = None


_thread, _lock = _Thread(), threading.Lock()
_users, _call = 0, nn.Module.__call__


@contextlib.contextmanager
def collected(modules: dict[nn.Module, None]) -> Iterator[None]:
    """Add the modules that this thread calls, and all modules inside them, to `modules`.

    For a global hook, torch.compile would compile each network again.
    """
    global _users, _call
    with _lock:
        if not _users:
            _call, nn.Module.__call__ = nn.Module.__call__, _collect  # type: ignore[method-assign]
        _users += 1
    before, _thread.modules = _thread.modules, modules
    try:
        yield
    finally:
        _thread.modules = before
        with _lock:
            _users -= 1
            if not _users:
                nn.Module.__call__ = _call  # type: ignore[method-assign]


def is_collecting() -> bool:
    """Whether this thread is inside `collected`."""
    return _thread.modules is not None


def _collect(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    found = None if torch.compiler.is_compiling() else _thread.modules
    if found is not None and module not in found:
        # A module may use the parameters of another one inside it without calling it.
        found.update(dict.fromkeys(module.modules()))
    return _call(module, *args, **kwargs)
