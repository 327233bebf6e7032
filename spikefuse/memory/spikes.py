"""Spikes that layers keep for backward, as one bit each, through PyTorch's saved-tensor hooks.

Neurons mark their outputs that are sure to be binary. A tensor that any layer keeps and that lies
in the memory of a marked one is packed, once for all layers that keep it; others pass untouched.
Nothing here looks at values on a GPU, so nothing waits for it.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from spikefuse.kernels import bits
from spikefuse.memory.policies import Policy

#: What is kept instead of a tensor: its bits, or itself and its version.
Kept = bits.Packed | tuple[Tensor, int]

# Below so many values, two launches cost more than 4 bits of every 4 bytes are worth.
MIN_VALUES = 1 << 12


@dataclass
class _Marked:
    """A binary tensor, as the memory in which it lies and which it fills."""

    # While it exists, no other storage can have the same address.
    storage: StorageWeakRef
    neuron: str
    version: int
    num: int
    dtype: torch.dtype
    packed: bits.Packed | None = None
    stream: int = 0
    is_kept: bool = False

    def keep(self, x: Tensor) -> bits.Packed:
        """What to keep instead of `x`, a view of it."""
        self.is_kept = True
        stream = _stream(x.device)
        # What one stream has packed may be packed late for another.
        if self.packed is None or self.stream != stream:
            memory = x.detach().as_strided((self.num,), (1,), 0)
            self.packed, self.stream = bits.pack(memory), stream
        return self.packed.viewed_as(x)


class Spikes:
    """The marked spikes of one call, by the address of their storage; see `keeping`.

    Attributes:
        saved: the bytes by neuron that packing has saved.
    """

    def __init__(self) -> None:
        self._marked: dict[int, _Marked] = {}
        self.saved: dict[str, int] = {}

    def mark(self, x: Tensor, neuron: str = "", packed: Tensor | None = None) -> None:
        """Note that all values of `x`, an output of `neuron`, are 0 or 1 now.

        Args:
            packed: their bits in the order of memory, if they are known.
        """
        # Bits that nobody has kept go with the spikes.
        for key in [k for k, m in self._marked.items() if m.storage.expired()]:
            del self._marked[key]
        num = x.numel()
        if num < MIN_VALUES or type(x) is not Tensor or x.is_inference():
            return
        storage = x.untyped_storage()
        if storage.nbytes() == num * x.itemsize:
            marked = _Marked(StorageWeakRef(storage), neuron, x._version, num, x.dtype)
            if packed is not None:
                marked.packed = bits.Packed(packed, num, x.dtype, tuple(x.shape), x.stride())
                marked.stream = _stream(x.device)
            self._marked[storage._cdata] = marked

    def mark_selected(self, y: Tensor, x: Tensor) -> None:
        """Note that all values of `y` are some of those of `x`: binary, if these are."""
        marked = self._found(x)
        if marked is not None:
            self.mark(y, marked.neuron)

    def clear(self) -> None:
        self._marked.clear()

    def pack(self, x: Tensor) -> Kept:
        """What to keep instead of `x`."""
        # Most of what is kept, parameters, is no plain tensor.
        marked = self._found(x) if type(x) is Tensor else None
        if marked is None:
            return _as_it_is(x)
        first = not marked.is_kept
        kept = marked.keep(x)
        if first:
            less = marked.num * marked.dtype.itemsize - kept.bits.nbytes
            self.saved[marked.neuron] = self.saved.get(marked.neuron, 0) + less
        return kept

    def _found(self, x: Tensor) -> _Marked | None:
        """The marked tensor in whose memory `x` lies, if all is as when it was marked."""
        if not self._marked or type(x) is not Tensor or x.layout is not torch.strided:
            return None
        marked = self._marked.get(x.untyped_storage()._cdata)
        if marked is None or x._version != marked.version or x.dtype is not marked.dtype:
            return None
        return marked


def _as_it_is(x: Tensor) -> Kept:
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


class Ledger:
    """What layers keep for backward while its `hooks` are in force.

    Attributes:
        layer: the name of the layer that runs, which its user sets.
    """

    def __init__(self) -> None:
        self.layer = ""
        self._notes: list[weakref.ref[_Note]] = []

    def hooks(self, pack: Callable[[Tensor], Kept] = _as_it_is) -> saved_tensors_hooks:
        return saved_tensors_hooks(_Noting(self, pack), lambda note: unpack(note.kept))

    def sizes(
        self, ignored: Container[int], layers: Container[str] | None = None
    ) -> Iterator[Size]:
        """What graphs still keep; memory that several layers keep is the first one's.

        Args:
            ignored: addresses of memory that does not count, such as that of parameters.
            layers: those that count, None for all.
        """
        seen: set[int] = set()
        left: dict[int, int] = {}  # of each memory, the bytes that no view has counted
        for note in filter(None, [reference() for reference in self._notes]):
            packed = note.kept if isinstance(note.kept, bits.Packed) else None
            x = packed.bits if packed else note.kept[0]
            start, memory = x.data_ptr(), x.untyped_storage()
            address = memory.data_ptr()
            outside = layers is not None and note.layer not in layers
            if outside or start in seen or address in ignored:
                continue
            seen.add(start)
            size = min(num_bytes(x), left.setdefault(address, memory.nbytes()))
            left[address] -= size
            plain = packed.num * packed.dtype.itemsize if packed else size
            yield Size(note.layer, size, plain, address)


class Size(NamedTuple):
    """What a layer keeps of the memory at `address`: bytes as it is, and if it were not packed."""

    layer: str
    now: int
    plain: int
    address: int


@dataclass(eq=False)
class _Note:
    """Lives as long as the graph keeps the tensor."""

    kept: Kept
    layer: str


@dataclass(frozen=True)
class _Noting:
    """A hook that keeps what `pack` gives."""

    ledger: Ledger
    pack: Callable[[Tensor], Kept]

    def __call__(self, x: Tensor) -> _Note:
        note = _Note(self.pack(x), self.ledger.layer)
        self.ledger._notes.append(weakref.ref(note))
        return note


def num_bytes(x: Tensor) -> int:
    """The bytes in memory that a tensor reads; dims of stride 0 count once."""
    sizes = [size for size, stride in zip(x.shape, x.stride(), strict=True) if stride or not size]
    return x.itemsize * functools.reduce(int.__mul__, sizes, 1)


def can_measure() -> bool:
    """Whether layers keep tensors, and a ledger would see them."""
    return _hook() is None


_NOTHING = object()


def _hook() -> Any:
    """The hook that gets what layers keep: None without one, `_NOTHING` if none would be called."""
    if (
        torch.compiler.is_compiling()
        or not torch.is_grad_enabled()
        or not torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    ):
        return _NOTHING
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if top is None else top[0]


@contextlib.contextmanager
def keeping(policy: Policy) -> Iterator[Spikes | None]:
    """Inside, layers keep spikes as the policy says.

    Nothing is packed without gradients, under torch.compile, and where other saved-tensor hooks
    than those of a ledger are in force, which would then see nothing: those of
    torch.utils.checkpoint keep nothing at all.
    """
    hook = _hook() if policy.packs_spikes else _NOTHING
    if hook is not None and not isinstance(hook, _Noting):
        yield None
        return
    spikes = Spikes()
    noted = hook.ledger.hooks(spikes.pack) if hook else None
    try:
        with noted or saved_tensors_hooks(spikes.pack, unpack):
            yield spikes
    finally:
        # The graph holds on to the hooks, and must not hold on to more through them.
        spikes.clear()


def _stream(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return torch._C._cuda_getCurrentRawStream(device.index)
