"""Numba's cache of machine code, which notices damage and survives failed writes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core.caching import CompileResultCacheImpl, FunctionCache, InTreeCacheLocator
from numba.core.serialize import dumps

from spikefuse.kernels.cache_folder import FIX, check_ancestors, private_directory


def cache_of(function: Callable[..., Any]) -> KernelCache:
    """Return the cache of a kernel, in this library's folder.

    Raises:
        OSError: it can't be written, or others could write it.
    """
    try:
        return KernelCache(function)
    except RuntimeError as error:
        raise OSError(f"can't write to {private_directory()}; {FIX} that can be written") from error


@functools.cache
def _inlined() -> bytes:
    """Return a hash of the files with functions that kernels may inline."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


class _Private(InTreeCacheLocator):
    """Machine code lies in our folder only, and is of this version of the inlined functions."""

    def __init__(self, function: Any, file: str) -> None:
        super().__init__(function, file)
        self._cache_path = str(private_directory() / self.get_suitable_cache_subpath(file))

    def get_source_stamp(self) -> Any:
        return super().get_source_stamp(), _inlined()


class _Checked(CompileResultCacheImpl):
    """Machine code with its checksum."""

    _locator_classes: list[type[object]] = [_Private]  # noqa: RUF012

    def reduce(self, result: Any) -> Any:
        data = dumps(super().reduce(result))
        return hashlib.sha256(data).digest(), data

    def rebuild(self, target: Any, payload: Any) -> Any:
        checksum, data = payload
        if hashlib.sha256(data).digest() != checksum:
            raise ValueError("wrong checksum")
        return super().rebuild(target, pickle.loads(data))


class KernelCache(FunctionCache):
    """A cache that compiles again what it cannot load, and goes on where it cannot save."""

    _impl_class = _Checked

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        check_ancestors(Path(self.cache_path))
        try:
            result = super().load_overload(sig, target_context)
            if result is None or tuple(result.signature.args) == tuple(sig):
                return result
        except Exception:  # unpickling damaged bytes may raise anything
            pass
        warnings.warn(
            f"{self._place} is damaged: its kernels are compiled again", RuntimeWarning, 2
        )
        with contextlib.suppress(OSError):
            self.flush()
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            warnings.warn(
                f"can't save compiled kernels to {self._place} ({error.strerror or error}), so "
                f"each process compiles them: free some space, or {FIX} that can be written",
                RuntimeWarning,
                2,
            )

    @property
    def _place(self) -> str:
        return f"{self.cache_path}/{self._impl.filename_base}.nbi"
