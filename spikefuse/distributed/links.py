"""Connections between the ranks that share a sequence."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from spikefuse.distributed.collectives import begin_gather
from spikefuse.distributed.faults import RankLost, RankWatchdog, recording


class AxisCollectives:
    """Collectives over all ranks of an axis, which never block the host of a GPU."""

    def __init__(self, group: dist.ProcessGroup, watchdog: RankWatchdog) -> None:
        self._group, self._watchdog, self.size = group, watchdog, group.size()

    def sum(self, x: Tensor) -> None:
        """Replace `x` by its sum over all ranks."""
        self._wait(dist.all_reduce(x, group=self._group, async_op=True), x)

    def gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, `[k, ...]`."""
        rows, work = begin_gather(x, self._group)
        self._wait(work, x)
        return rows

    def _wait(self, work: dist.Work | None, x: Tensor) -> None:
        assert work is not None
        self._watchdog.count += 1
        if x.is_cuda:
            self._watchdog.expect(work)
        self._watchdog.wait([work])

    def __deepcopy__(self, memo: dict[int, Any]) -> AxisCollectives:
        return self  # a copied network uses the same connections


class PeerLink:
    """A connection to one other rank, in both directions.

    On GPUs it has its own stream: sending waits for the computation before it, nothing waits for
    sending, and no call blocks the host. Call `flush` before the recording of a CUDA graph ends.

    Args:
        peer: the other rank, as numbered in the job.
        group: contains only these two ranks; in a larger group, sends could queue behind receives.
    """

    def __init__(self, peer: int, group: dist.ProcessGroup, watchdog: RankWatchdog) -> None:
        self.peer, self._group, self._watchdog = peer, group, watchdog
        #: Whether waiting blocks the host. Sends then complete only in `flush`.
        self.blocks = dist.get_backend(group) == "gloo"
        # Work, its tensor, and whether it was recorded.
        self._sent: deque[tuple[dist.Work, Tensor, bool]] = deque()

    def receive(self, tensors: Sequence[Tensor]) -> list[dist.Work]:
        """Start to receive into `tensors`; pass the result to `RankWatchdog.wait`."""
        works = []
        for work, x in self._start(dist.irecv, tensors):
            works.append(work)
            if x.is_cuda:
                self._watchdog.expect(work)
        return works

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Start to send tensors, which must not be written to until `flush`."""
        recorded = not self.blocks and recording()
        for work, x in self._start(dist.isend, tensors):
            self._sent.append((work, x, recorded))
        can_query = not self.blocks and not recorded
        while can_query and self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def flush(self) -> None:
        """Wait until all sends are complete, and release their tensors.

        On a GPU the stream waits, not the host.
        """
        if not self._sent:
            return
        recorded = not self.blocks and recording()
        # Recorded and eager work cannot wait for each other, and need not: a recording begins when
        # all previous work is complete.
        works = [work for work, _, was_recorded in self._sent if was_recorded == recorded]
        # GPUs send in order, so the last send is enough.
        self._watchdog.wait(works if self.blocks else works[-1:])
        self._sent.clear()

    def _start(
        self, transfer: Callable[..., dist.Work | None], tensors: Sequence[Tensor]
    ) -> list[tuple[dist.Work, Tensor]]:
        """Start to send or receive each dense tensor, except empty ones, in memory order."""
        started = []
        try:
            for x in tensors:
                if x.numel():
                    order = sorted(range(x.ndim), key=x.stride, reverse=True)
                    work = transfer(x.permute(order).view(-1), self.peer, self._group)
                    assert work is not None
                    started.append((work, x))
        except RuntimeError as error:
            raise RankLost(self._watchdog.diagnose()) from error
        return started
