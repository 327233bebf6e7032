"""Memory policies: what a network keeps of its forward pass for backward.

A policy is an object passed to `Temporal`. In float32 all give the same numbers, bit for bit.
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


Policy = SaveAll | Recompute | Bits

#: Policies by the name that a command line gives them.
POLICIES: dict[str, Policy] = {"save-all": SaveAll(), "recompute": Recompute(), "bits": Bits()}
