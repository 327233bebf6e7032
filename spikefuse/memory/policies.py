"""Memory policies: what a network saves of its forward pass for backward.

A policy is passed to `Temporal`. In float32, all policies give the same results bit for bit, except
that `Checkpoint` sums parameter gradients over microbatches.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Policy:
    """Base class of memory policies.

    Attributes:
        packs_spikes: layers save spikes as bits.
        saves_states: fused norms and neurons save their states instead of recomputing them.
        recomputes_network: layers save nothing, and backward recomputes them.
        run: runs the network of a `Temporal` call on the folded input, `run(net, call, x)`, and
            returns its output; None to call the network as usual.
    """

    packs_spikes: ClassVar[bool] = True
    saves_states: ClassVar[bool] = False
    recomputes_network: ClassVar[bool] = False
    run: ClassVar[Callable[..., Any] | None] = None


@dataclass(frozen=True)
class SaveAll(Policy):
    """Save all tensors unpacked: the most memory and no extra work.

    Convolutions and linear layers save their input spikes, and neurons save their input and the
    states stored every few steps.
    """

    packs_spikes: ClassVar[bool] = False
    saves_states: ClassVar[bool] = True


@dataclass(frozen=True)
class Recompute(Policy):
    """Save spikes as bits and recompute states; the default.

    Spikes are packed when a layer saves them, once for all layers that read them, and unpacked when
    its backward begins. Fused norms and neurons save no states; backward recomputes them.
    """


@dataclass(frozen=True)
class Bits(Policy):
    """Save spikes as bits and save states, which is faster than recomputing them."""

    saves_states: ClassVar[bool] = True


@dataclass(frozen=True)
class Checkpoint(Policy):
    """Save one bit per spike and recompute everything else by segments: the least memory.

    The whole network must have been fused by `spikefuse.fuse`. A segment reaches from neuron to
    neuron. A segment whose working set would set the peak runs in microbatches; norms take their
    statistics over the whole batch.

    Args:
        chunks: approximate number of microbatches of the largest segment. Other segments use
            enough to stay below its working set. With 1, the whole batch runs at once.

    Raises:
        ValueError: `chunks` is not an integer of at least 1.
    """

    recomputes_network: ClassVar[bool] = True

    chunks: int = 8

    def __post_init__(self) -> None:
        if type(self.chunks) is not int or self.chunks < 1:
            raise ValueError(f"chunks is {self.chunks!r}: expected an integer of at least 1")


@dataclass(frozen=True)
class Auto:
    """Choose one of the other policies for each neuron: the fastest choice within a budget.

    The first call that saves anything for backward runs under `Recompute` and measures it. Later
    calls with the same shape, strides, dtype and mode use the resulting choice.

    Args:
        budget: for everything that one call of the network saves for backward, in GB (1e9 bytes),
            without parameters and buffers. Gradients, optimizer states and temporary memory of
            layers do not count.

    Raises:
        ValueError: the budget is not a positive number.
    """

    budget: float

    def __post_init__(self) -> None:
        if not isinstance(self.budget, int | float) or not self.budget > 0:
            raise ValueError(
                f"budget is {self.budget!r}: expected a positive number of GB, such as 8.0, for "
                "what a network saves for backward"
            )

    def choose(
        self, saved: int, states: Mapping[str, int], spikes: Mapping[str, int]
    ) -> tuple[Policy, dict[str, Policy]]:
        """Return a policy, and exceptions by neuron.

        Args:
            saved: bytes saved under `Recompute`.
            states: by neuron, the bytes that `Bits` saves in addition.
            spikes: by neuron, the bytes that `SaveAll` saves in addition to `Bits`.

        Warns:
            UserWarning: the budget is too small for `Recompute`.
        """
        left = self.budget * 1e9 - saved
        if left < 0:
            warnings.warn(
                f"the network saves {saved / 1e9:.3g} GB for backward even under Recompute(), more "
                f"than the budget of {self.budget:.3g} GB: raise the budget, use smaller batches, "
                "or use Checkpoint(), which saves less",
                stacklevel=2,
            )
        if sum(states.values()) + sum(spikes.values()) <= left:
            return SaveAll(), {}
        chosen: dict[str, Policy] = {}
        # States come first: recomputing them costs more time per byte than packing spikes.
        for name, size in _largest_first(states):
            if size <= left:
                chosen[name], left = Bits(), left - size
        for name, size in _largest_first(spikes):
            if size <= left and (name in chosen or name not in states):
                chosen[name], left = SaveAll(), left - size
        return Recompute(), chosen


def _largest_first(sizes: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    yield from sorted(sizes.items(), key=lambda item: -item[1])


#: Policies by their command-line names.
POLICIES: dict[str, Policy] = {
    "save-all": SaveAll(),
    "recompute": Recompute(),
    "bits": Bits(),
    "checkpoint": Checkpoint(),
}
