"""Memory policies: what a network keeps of its forward pass for backward.

A policy is an object passed to `Temporal`. In float32 all give the same numbers, bit for bit, but
for sums over parts of the batch in `Checkpoint`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class SaveAll:
    """Keep everything as it is: the most memory and no work.

    A convolution or linear layer keeps the spikes that it reads as they are; a neuron its input
    and the states that its kernel stored every few steps.
    """

    packs_spikes: ClassVar[bool] = False
    keeps_states: ClassVar[bool] = True


@dataclass(frozen=True)
class Recompute:
    """Keep what a convolution or linear layer gives, and one bit per spike: the default.

    Spikes that a layer keeps are packed as it is called, once for all layers that read them, and
    unpacked as its backward begins. A fused norm and neuron keeps no states: it computes them
    again.
    """

    packs_spikes: ClassVar[bool] = True
    keeps_states: ClassVar[bool] = False


@dataclass(frozen=True)
class Bits:
    """Keep one bit per spike, as `Recompute`, and states as `SaveAll`: faster than the first
    where a fused norm and neuron would compute its states again."""

    packs_spikes: ClassVar[bool] = True
    keeps_states: ClassVar[bool] = True


@dataclass(frozen=True)
class Checkpoint:
    """Keep one bit per spike and compute everything else again, a segment of the network at a time:
    the least memory. For networks that `spikefuse.fuse` has fused as a whole.

    A segment goes from neuron to neuron. Where its working set would set the peak, it is worked
    through in parts of the batch; norms take their statistics over the whole batch.

    Args:
        chunks: about how many parts the largest segment has; others have as many as keep their
            working set below its. With 1, all are computed as a whole.

    Raises:
        ValueError: `chunks` is no whole number of at least 1.
    """

    packs_spikes: ClassVar[bool] = True
    keeps_states: ClassVar[bool] = False

    chunks: int = 8

    def __post_init__(self) -> None:
        if type(self.chunks) is not int or self.chunks < 1:
            raise ValueError(f"chunks is {self.chunks!r}: expected a whole number of at least 1")


Policy = SaveAll | Recompute | Bits | Checkpoint

#: Policies by the name that a command line gives them.
POLICIES: dict[str, Policy] = {
    "save-all": SaveAll(),
    "recompute": Recompute(),
    "bits": Bits(),
    "checkpoint": Checkpoint(),
}
