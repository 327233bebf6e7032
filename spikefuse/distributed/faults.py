"""Which rank is to blame when others wait for it in vain.

Every process counts what it does with other ranks, and a thread of it writes the count into the
job's store. A rank whose count is no longer written has ended; among those that live the one with
the lowest count is who the others wait for.
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

# Seconds between two signs of life, and without any after which a rank counts as ended.
BEAT, LIFE = 0.5, 10.0


def recording() -> bool:
    """Whether what this thread gives a GPU to do is recorded as a CUDA graph, and not done now. The
    host can't ask then whether it is done."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class RankLost(dist.DistError):
    """Another rank has ended, or does not come to where this one waits for it."""


class Watch:
    """The signs of life of the ranks that share a sequence, and this one's own.

    Args:
        ranks: of the axis, in the job.
        store: for all of them; asked by a thread of this object's.
        timeout: seconds that a rank may let a GPU wait. For a CPU the connections tell.
    """

    def __init__(self, ranks: Sequence[int], store: Store, timeout: float) -> None:
        self.rank, self.store, self.timeout = dist.get_rank(), store, timeout
        #: Exchanges begun; each rank has a part in every one, so that these counts compare.
        self.count = 0
        #: What GPUs wait for: a work, and since when.
        self.pending: deque[tuple[dist.Work, float]] = deque()
        # What each of the others wrote last, and when that was seen first.
        self.seen = {rank: ("", time.monotonic()) for rank in ranks if rank != self.rank}
        self._lock = threading.Lock()
        over = threading.Event()
        weakref.finalize(self, over.set)
        if self.seen:
            threading.Thread(target=_beat, args=(weakref.ref(self), over), daemon=True).start()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A block in which this rank waits for another one.

        Raises:
            RankLost: in vain.
        """
        try:
            yield
        except RuntimeError as error:
            raise RankLost(self.verdict()) from error

    def expect(self, work: dist.Work) -> None:
        """Note what a GPU waits for; if it waits for too long, the process ends. Of a recording
        nothing is noted: nobody watches its replays."""
        if recording():
            return
        with self._lock:
            self._forget()
            self.pending.append((work, time.monotonic()))

    def look(self, beat: int) -> None:
        """Give a sign of life and read the others'."""
        self.store.set(str(self.rank), f"{self.count} {beat}")
        for rank, (before, _) in self.seen.items():
            if self.store.check([str(rank)]):
                now = self.store.get(str(rank)).decode()
                if now != before:
                    self.seen[rank] = now, time.monotonic()

    def overdue(self) -> bool:
        """Whether a GPU waits for another rank in vain: for too long, or for one that ended."""
        with self._lock:
            self._forget()
            waited = time.monotonic() - self.pending[0][1] if self.pending else 0.0
        return waited > self.timeout or (waited > LIFE and self._ended() is not None)

    def _forget(self) -> None:
        # At once: a work keeps its tensor alive.
        while self.pending and self.pending[0][0].is_completed():
            self.pending.popleft()

    def verdict(self) -> str:
        """What is wrong with which rank, as the first one that asks finds it."""
        until = time.monotonic() + 2 * LIFE
        with contextlib.suppress(RuntimeError):  # the store may be gone too
            while not self.store.check(["verdict"]):
                ended = self._ended()
                if ended is not None or time.monotonic() > until:
                    self.store.set("verdict", self._found(ended))
                time.sleep(BEAT)
            return self.store.get("verdict").decode()
        return self._found(self._ended())

    def _ended(self) -> int | None:
        """The rank whose life ended first."""
        since = time.monotonic() - LIFE
        silent = [(when, rank) for rank, (_, when) in self.seen.items() if when < since]
        return min(silent)[1] if silent else None

    def _found(self, ended: int | None) -> str:
        if ended is not None:
            return f"rank {ended} has ended, and with it the job"
        counts = {rank: int(said.split()[0]) for rank, (said, _) in self.seen.items() if said}
        slowest = min(counts, key=lambda rank: counts[rank], default=self.rank)
        return (
            f"rank {slowest} keeps the others waiting: it has come to exchange "
            f"{counts.get(slowest, 0)}, rank {self.rank} to {self.count}; it hangs, or makes fewer "
            "calls than the others"
        )


def _beat(watch_of: weakref.ref[Watch], over: threading.Event) -> None:
    beat = 0
    while not over.wait(BEAT):
        watch = watch_of()
        if watch is None:
            return
        beat += 1
        try:
            watch.look(beat)
        except RuntimeError:  # the store has ended, which the connections will tell
            return
        if watch.overdue():
            print(f"rank {watch.rank}: {watch.verdict()}", file=sys.stderr, flush=True)
            # No exception reaches a main thread that waits for a GPU.
            os._exit(1)
        del watch
