"""Measure what layers save for backward."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from spikefuse.kernels import bits
from spikefuse.memory.spikes import RecordingHook, Saved, Spikes, unpack


class SavedSize(NamedTuple):
    """The bytes that `layer` saves in the memory at `address`, as saved and without packing."""

    layer: str
    now: int
    unpacked: int
    address: int


class SavedTensors:
    """The tensors that layers save for backward while its `hooks` are active.

    Args:
        layer: returns the name of the running layer.
    """

    def __init__(self, layer: Callable[[], str] = str) -> None:
        self.layer = layer
        self._entries: list[weakref.ref[_Entry]] = []

    def hooks(self, pack: Callable[[Tensor], Saved] | None = None) -> saved_tensors_hooks:
        return saved_tensors_hooks(
            _Hook(self, pack or Spikes().pack), lambda entry: unpack(entry.saved)
        )

    def sizes(
        self, ignored: Iterable[Tensor], layers: Container[str] | None = None
    ) -> Iterator[SavedSize]:
        """Yield the sizes of live saved tensors; shared memory counts for the first layer only.

        Args:
            ignored: tensors whose memory does not count, such as parameters.
            layers: the layers that count; None for all.
        """
        known = set(map(address_of, ignored))
        seen: set[int] = set()
        left: dict[int, int] = {}  # by address, the bytes that no view has counted yet
        for entry in filter(None, [reference() for reference in self._entries]):
            packed = entry.saved if isinstance(entry.saved, bits.Packed) else None
            x = packed.bits if packed else entry.saved[0]
            start, memory = x.data_ptr(), x.untyped_storage()
            address = memory.data_ptr()
            excluded = layers is not None and entry.layer not in layers
            if excluded or start in seen or address in known:
                continue
            seen.add(start)
            size = min(num_bytes(x), left.setdefault(address, memory.nbytes()))
            left[address] -= size
            unpacked = packed.num * packed.dtype.itemsize if packed else size
            yield SavedSize(entry.layer, size, unpacked, address)


@dataclass(eq=False)
class _Entry:
    """Lives as long as the graph holds the tensor."""

    saved: Saved
    layer: str


@dataclass(frozen=True)
class _Hook(RecordingHook):
    tensors: SavedTensors
    pack: Callable[[Tensor], Saved]

    def __call__(self, x: Tensor) -> _Entry:
        entry = _Entry(self.pack(x), self.tensors.layer())
        self.tensors._entries.append(weakref.ref(entry))
        return entry

    def around(self, pack: Callable[[Tensor], Saved]) -> saved_tensors_hooks:
        return self.tensors.hooks(pack)


def address_of(x: Tensor) -> int:
    """Return the address of the memory of a tensor, which views share."""
    return x.untyped_storage().data_ptr()


def num_bytes(x: Tensor) -> int:
    """Return the bytes of distinct elements; a dimension of stride 0 counts once."""
    sizes = [size for size, stride in zip(x.shape, x.stride(), strict=True) if stride or not size]
    return x.itemsize * math.prod(sizes)
