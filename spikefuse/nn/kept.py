"""Spikes that layers keep for backward, as one bit each, through PyTorch's saved-tensor hooks.

Neurons mark their outputs that are sure to be binary. A tensor that any layer keeps and that lies
in the memory of a marked one is packed, once for all layers that keep it; others pass untouched.
Nothing here looks at values on a GPU, so nothing waits for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from spikefuse.kernels import bits
from spikefuse.memory import Policy

#: What is kept instead of a tensor: its bits, or itself and its version.
Kept = bits.Packed | tuple[Tensor, int]

# Below so many values, two launches cost more than 4 bits of every 4 bytes are worth.
MIN_VALUES = 1 << 12


@dataclass
class _Marked:
    """A binary tensor, as the memory in which it lies and which it fills."""

    # While it exists, no other storage can have the same address.
    storage: StorageWeakRef
    version: int
    num: int
    dtype: torch.dtype
    packed: bits.Packed | None = None
    stream: int = 0

    def keep(self, x: Tensor) -> bits.Packed:
        """What to keep instead of `x`, a view of it."""
        stream = _stream(x.device)
        # What one stream has packed may be packed late for another.
        if self.packed is None or self.stream != stream:
            memory = x.detach().as_strided((self.num,), (1,), 0)
            self.packed, self.stream = bits.pack(memory), stream
        return self.packed.viewed_as(x)


class Spikes:
    """The marked spikes of one call, by the address of their storage; see `keeping`."""

    def __init__(self) -> None:
        self._marked: dict[int, _Marked] = {}

    def mark(self, x: Tensor) -> None:
        """Note that all values of `x` are 0 or 1 now."""
        num = x.numel()
        if num < MIN_VALUES or type(x) is not Tensor or x.is_inference():
            return
        storage = x.untyped_storage()
        if storage.nbytes() == num * x.itemsize:
            marked = _Marked(StorageWeakRef(storage), x._version, num, x.dtype)
            self._marked[storage._cdata] = marked

    def clear(self) -> None:
        self._marked.clear()

    def pack(self, x: Tensor) -> Kept:
        """What to keep instead of `x`."""
        if self._marked and type(x) is Tensor and x.layout is torch.strided:
            marked = self._marked.get(x.untyped_storage()._cdata)
            if marked is not None and x._version == marked.version and x.dtype is marked.dtype:
                return marked.keep(x)
        # A layer that keeps its own output would, with its history, keep itself alive.
        return x if x.is_leaf else x.detach(), x._version


def unpack(kept: Kept) -> Tensor:
    """The tensor instead of which `kept` was kept."""
    if isinstance(kept, bits.Packed):
        return kept.unpack()
    x, version = kept
    # PyTorch leaves this check to hooks, where there are any.
    if x._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {list(x.shape)} is at version {x._version}, and was "
            f"kept for backward at version {version}"
        )
    return x


@contextlib.contextmanager
def keeping(policy: Policy) -> Iterator[Spikes | None]:
    """Inside, layers keep spikes as the policy says.

    Nothing is packed without gradients, under torch.compile, and where other saved-tensor hooks
    are in force, which would then see nothing: those of torch.utils.checkpoint keep nothing at all.
    """
    if (
        torch.compiler.is_compiling()
        or not policy.packs_spikes
        or not torch.is_grad_enabled()
        or not torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    ):
        yield None
        return
    spikes = Spikes()
    try:
        with saved_tensors_hooks(spikes.pack, unpack):
            yield spikes
    finally:
        # The graph holds on to the hooks, and must not hold on to more through them.
        spikes.clear()


def _stream(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return torch._C._cuda_getCurrentRawStream(device.index)
