"""Find operations that synchronize with a GPU, on a machine without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# Operations that read a value on the host, as a result or for the size of a result.
WAITING = {
    *(aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.bincount),
    *(aten._unique2, aten.unique_consecutive, aten.unique_dim),
}


class Waits(TorchDispatchMode):
    """Record the operations that would synchronize with a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        masks = [x for x in args[1] if x is not None] if packet in _INDEXING else []
        if (
            packet in WAITING
            or any(x.dtype in (torch.bool, torch.uint8) for x in masks)
            or (packet is aten.repeat_interleave and kwargs.get("output_size") is None)
        ):
            self.seen.append(str(func))
        return func(*args, **kwargs)


_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


def waits(run: Callable[[], Any]) -> list[str]:
    """Return the operations in `run` that would synchronize with a GPU."""
    original = Tensor.tolist
    with Waits() as found, pytest.MonkeyPatch.context() as patch:

        def tolist(x: Tensor) -> Any:  # reads CPU memory without an operation
            found.seen.append("tolist")
            return original(x)

        patch.setattr(Tensor, "tolist", tolist)
        run()
    return found.seen
