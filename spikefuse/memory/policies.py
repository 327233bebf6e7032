"""Memory policies: what a network keeps of its forward pass for backward.

A policy is an object passed to `Temporal`. In float32 all give the same numbers, bit for bit, but
for sums over parts of the batch in `Checkpoint`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
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


@dataclass(frozen=True)
class Auto:
    """Keep as much as a budget allows, for speed: neuron by neuron one of the other policies.

    The first call that keeps anything for backward measures what that is, by `Recompute`; later
    calls on the same shape, strides and dtype, in the same mode, keep what has been chosen then.

    Args:
        budget: of all that one call of the network keeps for backward, in GB (1e9 bytes), beside
            parameters and buffers; gradients, optimizers and what layers need while they run do
            not count.

    Raises:
        ValueError: the budget is not a positive number.
    """

    budget: float

    def __post_init__(self) -> None:
        if not isinstance(self.budget, int | float) or not self.budget > 0:
            raise ValueError(
                f"budget is {self.budget!r}: expected a positive number of GB, such as 8.0, for "
                "what a network keeps for backward"
            )

    def choose(
        self, kept: int, states: Mapping[str, int], spikes: Mapping[str, int]
    ) -> tuple[Policy, dict[str, Policy]]:
        """A policy, and others for some neurons.

        Args:
            kept: bytes kept by `Recompute`.
            states: bytes by neuron that `Bits` keeps besides.
            spikes: bytes by neuron that `SaveAll` keeps besides `Bits`.

        Warns:
            UserWarning: the budget is too small for `Recompute`.
        """
        left = self.budget * 1e9 - kept
        if left < 0:
            warnings.warn(
                f"the network keeps {kept / 1e9:.3g} GB for backward even by Recompute(), more "
                f"than the budget of {self.budget:.3g} GB: raise it, make batches smaller, or use "
                "Checkpoint(), which keeps less",
                stacklevel=2,
            )
        if sum(states.values()) + sum(spikes.values()) <= left:
            return SaveAll(), {}
        chosen: dict[str, Policy] = {}
        # Computing states again takes longer than packing, for fewer bytes.
        for name, size in _largest_first(states):
            if size <= left:
                chosen[name], left = Bits(), left - size
        for name, size in _largest_first(spikes):
            if size <= left and (name in chosen or name not in states):
                chosen[name], left = SaveAll(), left - size
        return Recompute(), chosen


def _largest_first(sizes: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    yield from sorted(sizes.items(), key=lambda item: -item[1])


#: Policies by the name that a command line gives them.
POLICIES: dict[str, Policy] = {
    "save-all": SaveAll(),
    "recompute": Recompute(),
    "bits": Bits(),
    "checkpoint": Checkpoint(),
}
