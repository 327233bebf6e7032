"""Detect ranks that have ended or hang, so that the others do not wait for them forever.

Every process counts its exchanges with other ranks, and one of its threads writes the count to the
job's store. A rank that stops writing has ended. Among live ranks, the others wait for the one with
the lowest count.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

# Seconds between two heartbeats, and without any after which a rank counts as ended.
BEAT, LIFE = 0.5, 10.0


def recording() -> bool:
    """Return whether this thread records a CUDA graph; the host cannot query recorded work."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class RankLost(dist.DistError):
    """Another rank has ended, or does not join an exchange."""


class RankWatchdog:
    """Heartbeats of the ranks that share a sequence, including this one.

    Args:
        ranks: the ranks of the axis, as numbered in the job.
        store: shared by these ranks, and used from a thread of this object.
        timeout: seconds that a GPU may wait for another rank. On CPUs the connections time out.
    """

    def __init__(self, ranks: Sequence[int], store: Store, timeout: float) -> None:
        self.rank, self.store, self.timeout = dist.get_rank(), store, timeout
        #: Number of exchanges begun. All ranks take part in all of them, so counts are comparable.
        self.count = 0
        #: The work that GPUs wait for, and since when.
        self.pending: deque[tuple[dist.Work, float]] = deque()
        # The last heartbeat of each other rank, and when it was first seen.
        self.seen = {rank: ("", time.monotonic()) for rank in ranks if rank != self.rank}
        self._lock = threading.Lock()
        if self.seen:
            stop = threading.Event()
            thread = threading.Thread(target=_beat, args=(weakref.ref(self), stop), daemon=True)
            weakref.finalize(self, _end, thread, stop)
            thread.start()

    def wait(self, works: Iterable[dist.Work]) -> None:
        """Wait for exchanges with other ranks.

        Raises:
            RankLost: an exchange failed.
        """
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise RankLost(self.diagnose()) from error

    def expect(self, work: dist.Work) -> None:
        """Track work that a GPU waits for; the process ends if it takes too long.

        Recorded work is not tracked: replays are not watched.
        """
        if recording():
            return
        with self._lock:
            self._drop_completed()
            self.pending.append((work, time.monotonic()))

    def exchange_heartbeats(self, beat: int) -> None:
        """Write a heartbeat and read those of the other ranks."""
        self.store.set(str(self.rank), f"{self.count} {beat}")
        for rank, (before, _) in self.seen.items():
            if self.store.check([str(rank)]):
                now = self.store.get(str(rank)).decode()
                if now != before:
                    self.seen[rank] = now, time.monotonic()

    def is_overdue(self) -> bool:
        """Return whether a GPU waits too long for another rank, or for one that has ended."""
        with self._lock:
            self._drop_completed()
            waited = time.monotonic() - self.pending[0][1] if self.pending else 0.0
        return waited > self.timeout or (waited > LIFE and self._ended() is not None)

    def _drop_completed(self) -> None:
        # Called often, because work holds a reference to its tensor.
        while self.pending and self.pending[0][0].is_completed():
            self.pending.popleft()

    def diagnose(self) -> str:
        """Describe the fault. The first rank to call this decides, and all ranks agree."""
        until = time.monotonic() + 2 * LIFE
        with contextlib.suppress(RuntimeError):  # the store may have ended too
            while not self.store.check(["fault"]):
                ended = self._ended()
                if ended is not None or time.monotonic() > until:
                    self.store.set("fault", self._describe(ended))
                time.sleep(BEAT)
            return self.store.get("fault").decode()
        return self._describe(self._ended())

    def _ended(self) -> int | None:
        """Return the rank that ended first, or None."""
        since = time.monotonic() - LIFE
        silent = [(when, rank) for rank, (_, when) in self.seen.items() if when < since]
        return min(silent)[1] if silent else None

    def _describe(self, ended: int | None) -> str:
        if ended is not None:
            return f"rank {ended} has ended, and with it the job"
        counts = {rank: int(beat.split()[0]) for rank, (beat, _) in self.seen.items() if beat}
        slowest = min(counts, key=lambda rank: counts[rank], default=self.rank)
        return (
            f"rank {slowest} keeps the others waiting: it has reached exchange "
            f"{counts.get(slowest, 0)}, rank {self.rank} has reached {self.count}; it hangs, or "
            "makes fewer calls than the others"
        )


def _end(thread: threading.Thread, stop: threading.Event) -> None:
    """Stop a heartbeat. Python aborts if it ends while a thread of its own is inside the store."""
    stop.set()
    if thread is not threading.current_thread():
        thread.join(LIFE)


def _beat(watchdog_ref: weakref.ref[RankWatchdog], stop: threading.Event) -> None:
    beat = 0
    while not stop.wait(BEAT):
        watchdog = watchdog_ref()
        if watchdog is None:
            return
        beat += 1
        try:
            watchdog.exchange_heartbeats(beat)
        except RuntimeError:  # the store has ended; the connections will report it
            return
        if watchdog.is_overdue():
            print(f"rank {watchdog.rank}: {watchdog.diagnose()}", file=sys.stderr, flush=True)
            # An exception would not reach a main thread that waits for a GPU.
            os._exit(1)
        del watchdog
