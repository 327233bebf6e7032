"""Locks between processes that compile the same kernels."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

try:
    import fcntl
except ImportError:  # not Unix
    fcntl = None  # type: ignore[assignment]

# Seconds after which a process no longer waits for what another one compiles.
PATIENCE = 60.0


_locked: set[str] = set()


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """A block that one process at a time runs for a file, where the system can tell; within it,
    other blocks for the file belong to it. For one thread at a time.

    Processes that start together need the same kernels: the first compiles them, the others find
    them in the cache.
    """
    if fcntl is None or path in _locked:
        yield
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context(open(path, "rb"))
            _wait_for(file.fileno())
        _locked.add(path)
        try:
            yield
        finally:
            _locked.discard(path)


def _wait_for(descriptor: int) -> None:
    """Lock an open file, which closing it unlocks."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
