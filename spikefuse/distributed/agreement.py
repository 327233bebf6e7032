"""Compare the calls of all ranks, so that a wrong call raises an error instead of hanging."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from spikefuse.distributed.collectives import begin_gather
from spikefuse.distributed.faults import RankLost, RankWatchdog, recording
from spikefuse.distributed.mesh import steps_of

# Bytes of the message in which a rank describes a call.
MESSAGE = 512


class Agreement:
    """Compares the calls of all ranks of an axis, on their hosts.

    On GPUs a rank that repeats an earlier call does not wait for the other ranks: the messages are
    compared at the next call. Recording a CUDA graph waits; replays are not compared.

    Args:
        group: the ranks, connected through their hosts.
        waits: whether to wait for the other ranks at every call.
    """

    def __init__(self, group: dist.ProcessGroup, waits: bool, watchdog: RankWatchdog) -> None:
        self.waits, self._group, self._watchdog = waits, group, watchdog
        self._number, self._known = 0, set[str]()
        self._pending: tuple[Tensor, dist.Work] | None = None

    def compare(self, x: Tensor, about: str) -> None:
        """Compare a call on this rank's steps `x` with the calls of the other ranks.

        Raises:
            ValueError: the calls differ.
            RankLost: another rank has ended or hangs.
        """
        order = sorted(range(1, x.ndim), key=x.stride, reverse=True)
        dtype = str(x.dtype).removeprefix("torch.")
        # The number of steps comes first: it may differ between ranks, as in `steps_of`.
        call = f"{x.shape[0]} steps of [T, {', '.join(map(str, x.shape[1:]))}] {dtype}"
        call = f"{call} in memory order {order}, {about}"
        self._finish_comparison()
        self._number += 1
        self._watchdog.count += 1
        message = bytearray(call.encode()[:MESSAGE].ljust(MESSAGE, b"\0"))
        # A thread of Gloo frees what is sent, perhaps after Python has ended: not a bytearray.
        mine = torch.frombuffer(message, dtype=torch.uint8).clone()
        try:
            self._pending = begin_gather(mine, self._group)
        except RuntimeError as error:
            raise RankLost(self._watchdog.diagnose()) from error
        if self.waits or call not in self._known or recording():
            self._known.add(call)
            self._finish_comparison()

    def _finish_comparison(self) -> None:
        if self._pending is None:
            return
        (rows, work), self._pending = self._pending, None
        self._watchdog.wait([work])
        difference = _difference(tuple(map(bytes, rows.numpy())))
        if difference:
            raise ValueError(f"in call {self._number}, the ranks of a time axis {difference}")


@lru_cache
def _difference(messages: tuple[bytes, ...]) -> str:
    """Describe how the calls of the ranks differ, empty if they agree."""
    texts = [message.rstrip(b"\0").decode(errors="replace") for message in messages]
    counts, calls = zip(*(text.split(" ", 1) for text in texts), strict=True)
    if len(set(calls)) > 1:
        each = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
        return f"must make the same calls, but {each}"
    steps, size = [int(count) for count in counts], len(texts)
    total = sum(steps)
    expected = [len(range(total)[steps_of(total, rank, size)]) for rank in range(size)]
    if steps == expected:
        return ""
    return f"hold {steps} steps: expected {expected} of T = {total}, see `steps_of`"
