"""Find the rank for which the others wait in vain.

Every process counts its exchanges with other ranks, and a thread of it writes the count to the
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
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

# Seconds between two heartbeats, and without any after which a rank counts as ended.
BEAT, LIFE = 0.5, 10.0


def recording() -> bool:
    """Return whether this thread records a CUDA graph. Work is not executed then, so the host
    cannot query whether it has completed."""
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
        stop = threading.Event()
        weakref.finalize(self, stop.set)
        if self.seen:
            threading.Thread(target=_beat, args=(weakref.ref(self), stop), daemon=True).start()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Enclose code in which this rank waits for another one.

        Raises:
            RankLost: the exchange failed.
        """
        try:
            yield
        except RuntimeError as error:
            raise RankLost(self.verdict()) from error

    def expect(self, work: dist.Work) -> None:
        """Track work that a GPU waits for; the process ends if it takes too long. Work of a
        recording is not tracked: replays are not watched."""
        if recording():
            return
        with self._lock:
            self._drop_completed()
            self.pending.append((work, time.monotonic()))

    def look(self, beat: int) -> None:
        """Write a heartbeat and read those of the other ranks."""
        self.store.set(str(self.rank), f"{self.count} {beat}")
        for rank, (before, _) in self.seen.items():
            if self.store.check([str(rank)]):
                now = self.store.get(str(rank)).decode()
                if now != before:
                    self.seen[rank] = now, time.monotonic()

    def overdue(self) -> bool:
        """Return whether a GPU waits too long for another rank, or for one that has ended."""
        with self._lock:
            self._drop_completed()
            waited = time.monotonic() - self.pending[0][1] if self.pending else 0.0
        return waited > self.timeout or (waited > LIFE and self._ended() is not None)

    def _drop_completed(self) -> None:
        # Promptly, because work keeps its tensor alive.
        while self.pending and self.pending[0][0].is_completed():
            self.pending.popleft()

    def verdict(self) -> str:
        """Describe the fault. The first rank to ask decides, and all ranks give the same answer."""
        until = time.monotonic() + 2 * LIFE
        with contextlib.suppress(RuntimeError):  # the store may have ended too
            while not self.store.check(["verdict"]):
                ended = self._ended()
                if ended is not None or time.monotonic() > until:
                    self.store.set("verdict", self._describe(ended))
                time.sleep(BEAT)
            return self.store.get("verdict").decode()
        return self._describe(self._ended())

    def _ended(self) -> int | None:
        """The rank that ended first."""
        since = time.monotonic() - LIFE
        silent = [(when, rank) for rank, (_, when) in self.seen.items() if when < since]
        return min(silent)[1] if silent else None

    def _describe(self, ended: int | None) -> str:
        if ended is not None:
            return f"rank {ended} has ended, and with it the job"
        counts = {rank: int(said.split()[0]) for rank, (said, _) in self.seen.items() if said}
        slowest = min(counts, key=lambda rank: counts[rank], default=self.rank)
        return (
            f"rank {slowest} keeps the others waiting: it has reached exchange "
            f"{counts.get(slowest, 0)}, rank {self.rank} has reached {self.count}; it hangs, or "
            "makes fewer calls than the others"
        )


def _beat(watch_ref: weakref.ref[RankWatchdog], stop: threading.Event) -> None:
    beat = 0
    while not stop.wait(BEAT):
        watch = watch_ref()
        if watch is None:
            return
        beat += 1
        try:
            watch.look(beat)
        except RuntimeError:  # the store has ended; the connections will report it
            return
        if watch.overdue():
            print(f"rank {watch.rank}: {watch.verdict()}", file=sys.stderr, flush=True)
            # An exception would not reach a main thread that waits for a GPU.
            os._exit(1)
        del watch
