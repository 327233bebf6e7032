"""Connections between the ranks that share a sequence."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from spikefuse.block.batch_norm import begin_gather
from spikefuse.distributed.faults import Watch, recording


class Ranks:
    """All ranks of an axis together; nothing here blocks the host of a GPU.

    Args:
        group: of the ranks.
        watch: tells which of them is missing.
    """

    def __init__(self, group: dist.ProcessGroup, watch: Watch) -> None:
        self._group, self._watch, self.size = group, watch, group.size()

    def sum(self, x: Tensor) -> None:
        """Replace `x` by the sum of all ranks'."""
        self._wait(dist.all_reduce(x, group=self._group, async_op=True), x)

    def gather(self, x: Tensor) -> Tensor:
        """Those of all ranks, `[k, ...]`."""
        rows, work = begin_gather(x, self._group)
        self._wait(work, x)
        return rows

    def _wait(self, work: dist.Work | None, x: Tensor) -> None:
        assert work is not None
        self._watch.count += 1
        if x.is_cuda:
            self._watch.expect(work)
        with self._watch.waiting():
            work.wait()

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self  # a copied network uses the same connections


class Link:
    """A connection to one other process, in both directions.

    On GPUs it has a stream of its own: sending waits for what has been computed, nothing waits for
    sending, and no call blocks the host. Of a CUDA graph, whoever records it has to `settle` before
    the recording ends.

    Args:
        peer: the other one's rank in the job.
        group: of these two alone; on a larger one, what goes forth could queue behind what comes.
        watch: tells which rank is missing.
    """

    def __init__(self, peer: int, group: dist.ProcessGroup, watch: Watch) -> None:
        self.peer, self._group, self._watch = peer, group, watch
        #: Whether to wait is to block the host, and what is sent is lost if nobody waits.
        self.blocks = dist.get_backend(group) == "gloo"
        # Each with whether it was recorded.
        self._sent: deque[tuple[dist.Work, Tensor, bool]] = deque()

    def receive(self, tensors: Sequence[Tensor]) -> list[dist.Work]:
        """Begin to write into `tensors` what the peer sends; `wait` for it."""
        works: list[dist.Work] = []
        with self._watch.waiting():
            for x in tensors:
                work = dist.irecv(_memory(x), self.peer, self._group) if x.numel() else None
                works += [work] if work is not None else []
                if work is not None and x.is_cuda:
                    self._watch.expect(work)
        return works

    def wait(self, works: Sequence[dist.Work]) -> None:
        """Wait for what is received."""
        with self._watch.waiting():
            for work in works:
                work.wait()

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send tensors, which nobody may write to any more, until `settle`."""
        recorded = not self.blocks and recording()
        with self._watch.waiting():
            for x in tensors:
                work = dist.isend(_memory(x), self.peer, self._group) if x.numel() else None
                self._sent += [(work, x, recorded)] if work is not None else []
        asks = not self.blocks and not recorded
        while asks and self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def settle(self) -> None:
        """Wait until what has been sent has arrived, and let it go. A GPU waits, not its host."""
        recorded = not self.blocks and recording()
        # A recording and what is around it can't wait for each other, and need not: it begins when
        # all is done that came before.
        works = [work for work, _, was_recorded in self._sent if was_recorded == recorded]
        # What a GPU sends leaves in order.
        with self._watch.waiting():
            for work in works if self.blocks else works[-1:]:
                work.wait()
        self._sent.clear()


def _memory(x: Tensor) -> Tensor:
    """A dense tensor's memory as one row, in whatever order its dims lie."""
    order = sorted(range(x.ndim), key=lambda d: (-x.stride()[d], d))
    return x.permute(order).view(-1)
