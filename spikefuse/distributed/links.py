"""Point-to-point connections between processes with neighbouring steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor


class Link:
    """A connection to one other process, in both directions.

    On GPUs it has a stream of its own: sending waits for what has been computed, nothing waits for
    sending, and no call blocks the host.

    Args:
        peer: the other one's rank in the job.
        group: of these two alone; on a larger one, what goes forth could queue behind what comes.
    """

    def __init__(self, peer: int, group: dist.ProcessGroup) -> None:
        self.peer, self._group = peer, group
        #: Whether to wait is to block the host, and what is sent is lost if nobody waits.
        self.blocks = dist.get_backend(group) == "gloo"
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def receive(self, tensors: Sequence[Tensor]) -> list[dist.Work]:
        """Begin to write into `tensors` what the peer sends; each work has to be waited for."""
        works = [dist.irecv(_memory(x), self.peer, self._group) for x in tensors if x.numel()]
        return [work for work in works if work is not None]

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send tensors, which nobody may write to any more, until `settle`."""
        for x in tensors:
            if x.numel():
                work = dist.isend(_memory(x), self.peer, self._group)
                assert work is not None
                self._sent.append((work, x))

    def settle(self) -> None:
        """Wait until what has been sent has arrived, and let it go. A GPU waits, not its host."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()


def _memory(x: Tensor) -> Tensor:
    """A dense tensor's memory as one row, in whatever order its dims lie."""
    order = sorted(range(x.ndim), key=lambda d: (-x.stride()[d], d))
    return x.permute(order).view(-1)
