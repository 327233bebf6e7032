"""State passing between two halves of a sequence, in one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from spikefuse.scan.state_passing import Channel, StatePassing


class Queues(StatePassing):
    """One of two processes that share two queues, forth and back."""

    def __init__(
        self,
        is_first: bool,
        forth: deque[Tensor],
        back: deque[Tensor],
        count: int,
        speculates: bool = False,
    ):
        self.is_first, self.is_last = is_first, not is_first
        self.forth, self.back, self.count = forth, back, count
        self.speculates = speculates

    def microbatches(self, batch: int) -> list[slice]:
        return [slice(i * batch // self.count, (i + 1) * batch // self.count)
                for i in range(self.count)]  # fmt: skip

    def forward(self, buffers):
        return QueueChannel(None if self.is_first else self.forth, self.forth, buffers)

    def backward(self, buffers):
        return QueueChannel(None if self.is_last else self.back, self.back, buffers)


class QueueChannel(Channel):
    def __init__(self, source, target, buffers) -> None:
        super().__init__(buffers)
        self.source, self.target = source, target

    def receive(self, i: int) -> list[Tensor]:
        if self.source is not None:
            for x in self.buffers[i]:
                x.copy_(self.source.popleft())
        return self.buffers[i]

    def send(self, i: int, states: Sequence[Tensor]) -> None:
        if self.source is None:
            self.target.extend(x.clone() for x in states)
