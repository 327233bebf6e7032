"""Threads that trace and compile, and the locks that they hold."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain
from typing import Any, TypeVar

T = TypeVar("T")

# Bytes of stack that compilers may need. Threads have as much by default on Linux.
STACK = 8 << 20

#: Held while a step is traced and while generated source is imported; neither is thread-safe.
compiling = threading.RLock()
#: Held while a thread is started: the size of its stack is a setting of the process.
_starting = threading.RLock()
#: In the order in which threads take them; `_starting` is the last.
_locks: list[Any] = [compiling]
#: The locks that a fork holds.
_held: list[Any] = []


def hold_at_fork(lock: Any) -> None:
    """Let a fork wait until no thread holds `lock`, nor those that were named before: a child would
    find them locked for ever, and what they protect half done."""
    _locks.append(lock)


def _acquire() -> None:
    for lock in chain(_locks, [_starting]):  # a thread that holds the first may name another
        lock.acquire()
        _held.append(lock)


def _release() -> None:
    held = [*_held]
    _held.clear()  # another fork may follow as soon as the first lock is free
    for lock in reversed(held):
        lock.release()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_acquire, after_in_parent=_release, after_in_child=_release)


@cache
def import_module(name: str) -> Any:
    """Import a module of kernels while forks wait: a child would find it locked for ever.

    The import takes more stack than the caller may have.
    """
    with compiling:
        return on_thread(importlib.import_module, name)


@contextlib.contextmanager
def enough_stack() -> Iterator[None]:
    """Start threads with enough stack in a `with` block, whatever `threading.stack_size` says."""
    with _starting:
        size = threading.stack_size()
        if not 0 < size < STACK:
            yield
            return
        threading.stack_size(STACK)
        try:
            yield
        finally:
            threading.stack_size(size)


def on_thread(function: Callable[..., T], *args: Any) -> T:
    """Call a function on a thread of its own; here, where the interpreter ends and none starts."""
    with ThreadPoolExecutor(1, "spikefuse-compiler") as pool:
        try:
            with enough_stack():
                task = pool.submit(function, *args)
        except RuntimeError:
            return function(*args)
        return task.result()
