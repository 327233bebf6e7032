"""Shorten how long OpenMP's threads wait actively while the machine is busy.

Threads of GNU's OpenMP, which PyTorch uses, spin for milliseconds before they sleep. Where cores
are free, parallel loops start fast that way. Where threads share a core with other processes or
with each other, each loop spins for a thread that cannot run. OpenMP spins a few microseconds only
while it has more threads than there are cores. So while threads lack cores, a second pool of
threads, which sleep, shortens the waiting in PyTorch's operations and in kernels alike.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from pathlib import Path
from typing import Any

# Seconds between two measurements.
_PERIOD = 0.1
# The second pool starts when threads wait for cores for this share of the time, ...
_BUSY = 0.1
# ... and ends below this one.
_FREE = 0.02


def _waited() -> float:
    """Return the seconds for which threads of this process were ready to run and had no core."""
    total = 0
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            # Threads may end meanwhile, and systems may count nothing.
            with contextlib.suppress(OSError, IndexError):
                total += int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[1])
    return 1e-9 * total


class Watch:
    """Start the second pool when threads lack cores, and end it when they do not.

    Args:
        parallel: `GOMP_parallel` of the OpenMP library that PyTorch uses.
    """

    def __init__(self, parallel: Any) -> None:
        self.parallel = parallel
        self.time, self.waited = time.monotonic(), _waited()
        self.end: threading.Event | None = None
        self.lock = threading.Lock()

    def look(self, threads: int) -> None:
        """Call this before each use of `threads` threads."""
        now = time.monotonic()
        if now < self.time + _PERIOD or not self.lock.acquire(blocking=False):
            return
        try:
            waited = _waited()
            share = (waited - self.waited) / (now - self.time)
            self.time, self.waited = now, waited
            if self.end is None and share > _BUSY:
                self._start(threads)
            elif self.end is not None and share < _FREE:
                self.end.set()
                self.end = None
        finally:
            self.lock.release()

    def _start(self, threads: int) -> None:
        # PyTorch's pool and this one together have one thread more than there are cores.
        size = max(2, len(os.sched_getaffinity(0)) - threads + 2)
        if size > threads + 2:  # most cores are left to others
            return
        end = self.end = threading.Event()

        def hold() -> None:
            # Each thread calls free(NULL), which does nothing. The pool ends with this thread.
            self.parallel(ctypes.CDLL(None).free, None, size, 0)
            end.wait()

        threading.Thread(target=hold, name="spikefuse-busy", daemon=True).start()
