"""State passing: where the first state of a scan comes from and where its last state goes.

A scan of a whole sequence begins at rest, or from the state that its caller gives, and its last
state stays here: `StatePassing` itself does nothing. A subclass connects scans whose processes hold
neighbouring steps of a sequence. Forward, states travel with time; backward, their gradients travel
against it.

The batch is split into microbatches, so that one process computes a microbatch while the next
process computes the one before. They are slices of the whole sequences, read and written in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

#: The states of each microbatch, or their gradients.
Buffers = Sequence[list[Tensor]]


class Collectives(Protocol):
    """Sums and gathers over all processes that hold steps of a sequence."""

    def sum(self, x: Tensor) -> None:
        """Replace `x` by its sum over the processes."""

    def gather(self, x: Tensor) -> Tensor:
        """`x` of all k processes, `[k, ...]`."""


class Channel:
    """Passes the states of one pass between processes; this base class passes none."""

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers

    def receive(self, i: int) -> list[Tensor]:
        """The states of microbatch i, once they have arrived; empty where the sequence begins."""
        return self.buffers[i]

    def send(self, i: int, states: Sequence[Tensor]) -> None:
        """Send the last states of microbatch i."""

    def close(self) -> None:
        """End the pass."""


class StatePassing:
    """How a scan receives its first state and sends its last; by default it does neither.

    Attributes:
        is_first: whether no steps come before.
        is_last: whether no steps come after.
        speculates: whether to scan before the states have arrived.
        statistics: over which batch norms take their statistics, None for this process alone.
    """

    is_first = is_last = True
    speculates = False
    statistics: Collectives | None = None

    def begin(self, x: Tensor, call: str, has_state: bool) -> None:
        """Begin a call of a network on the steps `x`.

        Args:
            call: describes what must be the same in all processes, besides what `x` shows.
            has_state: whether the caller passes an initial state.
        """

    def end(self) -> None:
        """End a call of a network, except for its backward pass."""

    def microbatches(self, batch: int) -> list[slice]:
        """The slices of a batch, the same in all processes."""
        return [slice(0, batch)]

    def forward(self, buffers: Buffers) -> Channel:
        """The channel of a forward pass; `buffers` are unwritten."""
        return Channel(buffers)

    def backward(self, buffers: Buffers) -> Channel:
        """The channel of a backward pass, which runs against time."""
        return Channel(buffers)


#: For a sequence whose steps are all here.
WHOLE = StatePassing()
#: Computes a microbatch from the states that arrived, and returns the states to send.
Compute = Callable[[int, Sequence[Tensor]], Sequence[Any]]


def exchange(channel: Channel, compute: Compute, repair: Compute | None = None) -> None:
    """Compute all microbatches, each once its states have arrived.

    Args:
        repair: called in place of `compute` after a computation without states; None to wait.
    """
    microbatches = range(len(channel.buffers))
    if repair is not None:
        for i in microbatches:
            compute(i, [])
    for i in microbatches:
        channel.send(i, (repair or compute)(i, channel.receive(i)))
    channel.close()
