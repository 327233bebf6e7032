"""Numba's cache of machine code, which notices damage and survives failed writes."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.serialize import dumps

from spikefuse.kernels.cache_folder import FIX, private_directory


def cache_of(function: Callable[..., Any]) -> KernelCache:
    """Return the cache of a kernel: beside its source, else in this library's own cache.

    Raises:
        OSError: neither can be written.
    """
    try:
        return KernelCache(function)
    except RuntimeError:  # Numba can write neither beside the source nor in the user's cache
        # Numba reads this setting only while it makes a cache.
        config: Any = numba.config
        before, config.CACHE_DIR = config.CACHE_DIR, str(private_directory())
        try:
            return KernelCache(function)
        finally:
            config.CACHE_DIR = before


class _Checked(CompileResultCacheImpl):
    """Machine code with its checksum."""

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
