"""What a network saves for backward, and the memory that it allocates."""

import contextlib
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from spikefuse.kernels import bits
from spikefuse.memory import spikes as spikes_module


@contextlib.contextmanager
def packings():
    """Record the sizes of the tensors saved as bits, which the neuron's kernel may have written."""
    seen, known = [], []

    def pack(x):
        seen.append(x.numel())
        return packed(x)

    def save(binary, x):
        if binary.packed is not None and all(b is not binary for b in known):
            seen.append(binary.num)
        known.append(binary)
        return saved_as(binary, x)

    packed, saved_as = bits.pack, spikes_module._BinaryTensor.save
    with (
        mock.patch.object(bits, "pack", pack),
        mock.patch.object(spikes_module._BinaryTensor, "save", save),
    ):
        yield seen


class Allocations(TorchDispatchMode):
    """Memory of the results of operations, except for that of known tensors."""

    def __init__(self, known):
        super().__init__()
        self.known = {x.untyped_storage()._cdata for x in known}
        self.made = {}

    @classmethod
    def ignore_compile_internals(cls):
        return True  # captured graphs are measured, too

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(results):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in self.known:
                    self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return results

    def num_bytes(self):
        return sum(size for storage, size in self.made.values() if not storage.expired())


class Peak(Allocations):
    """The most bytes of new memory at any time."""

    peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = super().__torch_dispatch__(function, types, args, kwargs)
        self.peak = max(self.peak, self.num_bytes())
        return results


def bytes_saved(net, x, call=None):
    """Return the bytes of new memory that live as long as the output, and the output."""
    with Allocations([x, *net.parameters(), *net.buffers()]) as allocations:
        y = (call or net)(x)
    return allocations.num_bytes(), y
