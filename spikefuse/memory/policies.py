"""Memory policies: what a network saves of its forward pass for backward.

A policy is passed to `Temporal`. In float32, all policies give the same results bit for bit, those
of `Checkpoint` as a network that `spikefuse.fuse` has fused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Policy:
    """Base class of memory policies.

    Example::

        policy = sf.memory.POLICIES["bits"]
        net = sf.Temporal(nn.Sequential(nn.Linear(784, 128), sf.LIF()), memory=policy)

    Attributes:
        packs_spikes: layers save spikes as bits.
        saves_states: fused norms and neurons save their states instead of recomputing them.
        capture: makes what runs the network as captured graphs, see `Temporal.captured`; None if a
            policy does not need them.
    """

    packs_spikes: ClassVar[bool] = True
    saves_states: ClassVar[bool] = False
    capture: ClassVar[Callable[[], Callable[..., Any]] | None] = None


@dataclass(frozen=True)
class SaveAll(Policy):
    """Save all tensors unpacked: the most memory and no extra work.

    Convolutions and linear layers save their input spikes, and neurons save their input and the
    states stored every few steps.

    Example::

        layers = nn.Sequential(nn.Linear(784, 128), sf.LIF())
        net = sf.Temporal(layers, memory=sf.memory.SaveAll())
        net(torch.rand(8, 32, 784)).sum().backward()
    """

    packs_spikes: ClassVar[bool] = False
    saves_states: ClassVar[bool] = True


@dataclass(frozen=True)
class Recompute(Policy):
    """Save spikes as bits and recompute states; the default.

    Spikes are packed when a layer saves them, once for all layers that read them, and unpacked when
    its backward begins. Fused norms and neurons save no states; backward recomputes them.

    Example::

        layers = nn.Sequential(nn.Linear(784, 128), sf.LIF())
        net = sf.Temporal(layers, memory=sf.memory.Recompute())
        net(torch.rand(8, 32, 784)).sum().backward()
    """


@dataclass(frozen=True)
class Bits(Policy):
    """Save spikes as bits and save states, which is faster than recomputing them.

    Example::

        layers = nn.Sequential(nn.Linear(784, 128), sf.LIF())
        net = sf.Temporal(layers, memory=sf.memory.Bits())
        net(torch.rand(8, 32, 784)).sum().backward()
    """

    saves_states: ClassVar[bool] = True


@dataclass(frozen=True)
class Checkpoint(Policy):
    """Save one bit per spike and recompute everything else by segments: the least memory.

    The network runs as a captured graph, as `spikefuse.fuse` makes it. The graph is cut into
    segments where little is alive, such as spikes alone, and backward recomputes each of them. The
    cuts minimize what is saved and the largest segment. Where the network cannot be captured, it is
    a single segment: call `spikefuse.checkpoint` for parts of it instead.

    Example::

        layers = nn.Sequential(nn.Linear(784, 128), sf.LIF())
        net = sf.Temporal(layers, memory=sf.memory.Checkpoint())
        net(torch.rand(8, 32, 784)).sum().backward()

    Args:
        chunks: how small segments may be: one computes about a `chunks`-th of all bytes. With 1
            nothing is recomputed. The default is enough for the least memory in all models of this
            library.

    Raises:
        ValueError: `chunks` is not an integer of at least 1.
    """

    chunks: int = 16

    def __post_init__(self) -> None:
        if type(self.chunks) is not int or self.chunks < 1:
            raise ValueError(f"chunks is {self.chunks!r}: expected an integer of at least 1")


#: Policies by their command-line names.
POLICIES: dict[str, Policy] = {
    "save-all": SaveAll(),
    "recompute": Recompute(),
    "bits": Bits(),
    "checkpoint": Checkpoint(),
}
