"""What a recomputed network reads besides its input, as it was in the forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from spikefuse.kernels.norm import by_batch

_VALUES = (bool, int, float, str, tuple)
_MISSING = object()


class Snapshot:
    """The attributes of modules, without copies: parameters, buffers and others.

    Running statistics of batch norms that use those of the batch are left out, because nothing
    reads them.

    Args:
        modules: those of which all attributes count.
        attributes: others, as a module and a name.
    """

    def __init__(
        self, modules: Iterable[nn.Module], attributes: Iterable[tuple[nn.Module, str]]
    ) -> None:
        #: Owner, where the attribute is, its name, its value, and the version of a tensor.
        self._read: list[tuple[str, Mapping[str, Any], str, Any, int]] = []
        self._modes: list[tuple[nn.Module, bool]] = []
        for m in modules:
            owner = type(m).__name__
            own = {name: x for name, x in vars(m).items() if name[0] != "_" and name != "training"}
            self._modes.append((m, m.training))
            self._add(owner, vars(m), own)
            self._add(owner, m._parameters, m._parameters)
            self._add(owner, m._modules, m._modules)
            if not (isinstance(m, _BatchNorm) and by_batch(m)):
                self._add(owner, m._buffers, m._buffers)
        for m, name in attributes:
            for where in (vars(m), m._parameters, m._buffers):
                if name in where:
                    self._add(type(m).__name__, where, {name: where[name]})

    def _add(self, owner: str, where: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            version = value._version if isinstance(value, Tensor) else 0
            self._read.append((owner, where, name, value, version))

    def check_unchanged(self) -> None:
        """Raise a RuntimeError if an attribute was changed."""
        for owner, where, name, value, version in self._read:
            now = where.get(name, _MISSING)
            same = now is value or (isinstance(value, _VALUES) and now == value)
            if not same or (isinstance(value, Tensor) and value._version != version):
                raise RuntimeError(
                    f"{owner}.{name} was changed between forward and backward, which recomputes "
                    "the network with memory=Checkpoint(): change it after backward, or use "
                    "another policy"
                )

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        """Set the modules to training or evaluation as they were."""
        changed = [(m, training) for m, training in self._modes if m.training != training]
        for m, training in changed:
            m.training = training
        try:
            yield
        finally:
            for m, training in changed:
                m.training = not training
