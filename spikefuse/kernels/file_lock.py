"""File locks for processes that compile the same kernels."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

try:
    import fcntl
except ImportError:  # not Unix
    fcntl = None  # type: ignore[assignment]

# Seconds a process waits for another one to compile.
TIMEOUT = 60.0

_locked: set[str] = set()


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold a lock on an existing file; reentrant, for one thread at a time.

    Processes that start together need the same kernels: the first compiles them, the others find
    them in the cache. Does nothing on systems without `fcntl`, or if the file cannot be read.
    """
    if fcntl is None or path in _locked:
        yield
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context(open(path, "rb"))
            _lock(file.fileno())
        _locked.add(path)
        try:
            yield
        finally:
            _locked.discard(path)


def _lock(descriptor: int) -> None:
    """Lock an open file until it is closed, or give up after the timeout."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
