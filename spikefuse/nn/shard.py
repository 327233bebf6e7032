"""What a `Temporal` asks of the part of a job that holds the other steps of its sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from spikefuse.block.batch_norm import Ranks
from spikefuse.memory.microbatch import Part, by_sample, size
from spikefuse.scan.state_passing import Relay


class Shard(Relay, Protocol):
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


class Steps(NamedTuple):
    """How states lie in memory on their way: in all processes alike, whatever kernels write."""

    num: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: torch.device

    @classmethod
    def like(cls, x: Tensor, num: int) -> Steps:
        """For the states of a scan of `x` `[T, B, ...]`."""
        return cls(num, x.shape[2:], by_sample(x), x.device)

    def empty(self, part: Part) -> list[Tensor]:
        """Unwritten ones of a part."""
        shape, dtype = (size(part), *self.shape), torch.float32
        return [
            torch.empty_strided(shape, self.strides, dtype=dtype, device=self.device)
            for _ in range(self.num)
        ]

    def conform(self, states: Sequence[Tensor], part: Part) -> Sequence[Tensor]:
        if all(s.stride() == self.strides for s in states):
            return states
        return [y.copy_(s) for y, s in zip(self.empty(part), states, strict=True)]


def hand_on(
    relay: Shard | None,
    backward: bool,
    steps: Steps,
    parts: Sequence[Part],
    run: Callable[[Part, list[Tensor]], Sequence[Tensor]],
) -> dict[Part, list[Tensor]]:
    """`run` a scan part by part, on the states that the process before has sent for each, and send
    what it gives to the process after.

    Args:
        relay: the other processes; None if there are none.
        backward: whether these are gradients of states, which go the other way.
        parts: the same in all processes.
        run: gives the states of a part, from those that came. It waits for no process by itself.

    Returns:
        What came for each part: nothing in the process where the scan begins.
    """
    begins, ends = (True, True) if relay is None else (relay.is_first, relay.is_last)
    if backward:
        begins, ends = ends, begins
    received = [[] if begins else steps.empty(part) for part in parts]

    def step(i: int) -> Sequence[Tensor]:
        results = run(parts[i], received[i])
        return results if ends else steps.conform(results, parts[i])

    if relay is not None:
        (relay.backward if backward else relay.forward)(received, step)
    else:
        for i in range(len(parts)):
            step(i)
    return dict(zip(parts, received, strict=True))
