"""Saving spikes for backward as one bit each, through PyTorch's saved-tensor hooks.

Neurons register outputs that are binary by construction. A tensor that any layer saves and that
lies in the memory of a registered one is packed, once for all layers that save it. Other tensors
pass unchanged. No values are read on the host, so nothing synchronizes with the GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from spikefuse._torch import version
from spikefuse.kernels import bits
from spikefuse.kernels.triton_runtime import current_stream

#: What is saved for a tensor: its bits, or the tensor and its version.
Saved = bits.Packed | tuple[Tensor, int]

# Below this number of values, two kernel launches cost more than the saved memory is worth.
MIN_VALUES = 1 << 12


@dataclass
class _BinaryTensor:
    """A binary tensor that fills its storage."""

    storage: StorageWeakRef
    version: int
    num: int
    dtype: torch.dtype
    packed: Tensor | None = None  # its bits
    stream: int = 0

    def save(self, x: Tensor) -> bits.Packed:
        """Return the bits of `x`, a view of this tensor."""
        stream = _stream(x)
        # Bits packed on one stream may not be ready on another.
        if self.packed is None or self.stream != stream:
            memory = x.detach().as_strided((self.num,), (1,), 0)
            self.packed, self.stream = bits.pack(memory).bits, stream
        offset = int(x.storage_offset())
        return bits.Packed(self.packed, self.num, self.dtype, x.shape, x.stride(), offset)


@dataclass(eq=False)
class Spikes:
    """The binary tensors of one call; see `spikefuse.nn.call.inside`.

    Attributes:
        registered: by the address of their storage.
    """

    registered: dict[int, _BinaryTensor] = field(default_factory=dict)

    def register(self, x: Tensor, packed: Tensor | None = None) -> None:
        """Register `x`, whose values are all 0 or 1 at this point.

        Args:
            packed: the bits of `x` in memory order, if they are known.
        """
        num = x.numel()
        if num < MIN_VALUES or type(x) is not Tensor or x.is_inference():
            return
        # Bits that no layer has saved are freed when the next spikes are registered.
        for key in [k for k, b in self.registered.items() if b.storage.expired()]:
            del self.registered[key]
        storage = x.untyped_storage()
        if storage.nbytes() == num * x.itemsize:
            stored = packed, 0 if packed is None else _stream(x)
            self.registered[storage.data_ptr()] = _BinaryTensor(
                StorageWeakRef(storage), version(x), num, x.dtype, *stored
            )

    def register_selection(self, y: Tensor, x: Tensor) -> None:
        """Register `y`, all of whose values are values of `x`, if `x` is binary."""
        binary = self._find(x)
        if binary is not None:
            self.register(y)

    def pack(self, x: Tensor) -> Saved:
        """Return what to save for `x`: a saved-tensor hook."""
        # Most saved tensors are parameters, whose type is not Tensor.
        binary = self._find(x) if self.registered and type(x) is Tensor else None
        if binary is None:
            # Detached, because a layer that saves its own output would form a reference cycle.
            return x if x.is_leaf else x.detach(), version(x)
        return binary.save(x)

    def _find(self, x: Tensor) -> _BinaryTensor | None:
        """Return the registered tensor whose memory `x` views, unless it has changed since."""
        if not self.registered or type(x) is not Tensor or x.layout is not torch.strided:
            return None
        binary = self.registered.get(x.untyped_storage().data_ptr())
        if binary is None or x.dtype is not binary.dtype or version(x) != binary.version:
            return None
        return None if binary.storage.expired() else binary


def unpack(saved: Saved) -> Tensor:
    """Return the tensor for which `saved` was saved."""
    if isinstance(saved, bits.Packed):
        return saved.unpack()
    x, saved_version = saved
    # With saved-tensor hooks, PyTorch leaves this check to the hooks.
    if version(x) != saved_version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {list(x.shape)} is at version {version(x)}, and was "
            f"saved for backward at version {saved_version}"
        )
    return x


class RecordingHook(ABC):
    """A saved-tensor hook that records what is saved and delegates packing to another hook."""

    @abstractmethod
    def around(self, pack: Callable[[Tensor], Saved]) -> saved_tensors_hooks:
        """Return hooks that record what `pack` saves."""


def _stream(x: Tensor) -> int:
    return current_stream(x.device.index) if x.is_cuda else 0
