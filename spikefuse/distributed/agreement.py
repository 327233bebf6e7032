"""Ranks tell each other what they are about to do, so that a mistake is an error and no hang."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from spikefuse.distributed.faults import Watch, recording
from spikefuse.distributed.mesh import steps_of

# Bytes of what a rank says of a call.
MESSAGE = 512


class Agreement:
    """The ranks of an axis comparing their calls, on the hosts.

    On GPUs a call like the one before does not wait for the others' messages: they are compared
    when the next call comes. A call that is recorded as a CUDA graph waits; its replays are not
    compared.

    Args:
        group: of the ranks, on their hosts.
        waits: whether to wait for the others in any case.
        watch: tells which rank is missing.
    """

    def __init__(self, group: dist.ProcessGroup, waits: bool, watch: Watch) -> None:
        self.size, self.waits, self._group, self._watch = group.size(), waits, group, watch
        self._number, self._known = 0, set[str]()
        self._unread: tuple[dist.Work, list[Tensor]] | None = None

    def check(self, x: Tensor, about: str) -> None:
        """Compare a call on this rank's steps `x` with the other ranks' calls.

        Raises:
            ValueError: they differ.
        """
        order = sorted(range(1, x.ndim), key=lambda d: (-x.stride()[d], d))
        kind = str(x.dtype).removeprefix("torch.")
        said = f"{x.shape[0]} steps of [T, {', '.join(map(str, x.shape[1:]))}] {kind}"
        said = f"{said} in memory order {order}, {about}"
        self._read()
        self._number += 1
        self._watch.count += 1
        # The number of steps comes first: it may differ, as far as `steps_of` says so.
        message = f"{said} (call {self._number})".encode()[:MESSAGE]
        mine = torch.zeros(MESSAGE, dtype=torch.uint8)
        mine[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        with self._watch.waiting():
            work = dist.all_gather(rows, mine, group=self._group, async_op=True)
        assert work is not None
        self._unread = work, rows
        if self.waits or said not in self._known or recording():
            self._known.add(said)
            self._read()

    def _read(self) -> None:
        if self._unread is None:
            return
        (work, rows), self._unread = self._unread, None
        with self._watch.waiting():
            work.wait()
        _compare([bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows])


def _compare(said: list[str]) -> None:
    counts, rest = zip(*(message.split(" ", 1) for message in said), strict=True)
    steps, size = [int(count) for count in counts], len(said)
    if len(set(rest)) > 1:
        each = "; ".join(f"rank {rank}: {message}" for rank, message in enumerate(said))
        raise ValueError(f"the ranks of a time axis must make the same calls, but {each}")
    total = sum(steps)
    shares = [range(total)[steps_of(total, rank, size)] for rank in range(size)]
    if steps != [len(share) for share in shares]:
        raise ValueError(
            f"the ranks of a time axis hold {steps} steps: expected "
            f"{[len(share) for share in shares]} of T = {total}, as `steps_of` shares them"
        )
