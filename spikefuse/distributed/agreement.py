"""Compare the calls of all ranks, so that a wrong call raises an error instead of hanging."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from spikefuse.distributed.faults import RankWatchdog, recording
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
        self.size, self.waits, self._group, self._watchdog = group.size(), waits, group, watchdog
        self._number, self._known = 0, set[str]()
        self._pending: tuple[dist.Work, list[Tensor]] | None = None

    def check(self, x: Tensor, about: str) -> None:
        """Compare a call on this rank's steps `x` with the calls of the other ranks.

        Raises:
            ValueError: the calls differ.
        """
        order = sorted(range(1, x.ndim), key=lambda d: (-x.stride()[d], d))
        dtype = str(x.dtype).removeprefix("torch.")
        # The number of steps comes first: it may differ between ranks, as in `steps_of`.
        call = f"{x.shape[0]} steps of [T, {', '.join(map(str, x.shape[1:]))}] {dtype}"
        call = f"{call} in memory order {order}, {about}"
        self._finish_comparison()
        self._number += 1
        self._watchdog.count += 1
        message = f"{call} (call {self._number})".encode()[:MESSAGE]
        mine = torch.zeros(MESSAGE, dtype=torch.uint8)
        mine[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        with self._watchdog.waiting():
            work = dist.all_gather(rows, mine, group=self._group, async_op=True)
        assert work is not None
        self._pending = work, rows
        if self.waits or call not in self._known or recording():
            self._known.add(call)
            self._finish_comparison()

    def _finish_comparison(self) -> None:
        if self._pending is None:
            return
        (work, rows), self._pending = self._pending, None
        with self._watchdog.waiting():
            work.wait()
        _compare([bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows])


def _compare(messages: list[str]) -> None:
    counts, calls = zip(*(message.split(" ", 1) for message in messages), strict=True)
    if len(set(calls)) > 1:
        each = "; ".join(f"rank {rank}: {message}" for rank, message in enumerate(messages))
        raise ValueError(f"the ranks of a time axis must make the same calls, but {each}")
    steps, size = [int(count) for count in counts], len(messages)
    total = sum(steps)
    expected = [len(range(total)[steps_of(total, rank, size)]) for rank in range(size)]
    if steps != expected:
        raise ValueError(
            f"the ranks of a time axis hold {steps} steps: expected {expected} of T = {total}, "
            "see `steps_of`"
        )
