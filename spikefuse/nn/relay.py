"""What a `Temporal` asks of the part of a job that holds the other steps of its sequences."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from spikefuse import compiler
from spikefuse.nn.batch_norm import Ranks


class Shard(compiler.Relay, Protocol):
    """This process's place among those that share a sequence; `spikefuse.distributed` has one."""

    #: Whether batch norms take their statistics over all steps, those of other processes too.
    exact_statistics: bool

    @property
    def all(self) -> Ranks:
        """All these processes together."""
        ...

    def begin(self, x: Tensor, about: str) -> None:
        """Start a call of a network on this process's steps `x`; all processes have to.

        Args:
            about: what has to be the same in all of them, besides what `x` shows.

        Raises:
            ValueError: it is not.
        """
        ...

    def end(self) -> None:
        """End that call, its backward pass excepted."""
        ...
