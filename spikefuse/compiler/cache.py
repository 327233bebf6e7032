"""Generated source on disk: written once, imported as modules, found again by later processes.

The name of a file is the hash of everything that shapes the machine code besides the machine:
the generated source (hence the definition, as traced) and the compiler's own source. Numba and
Triton keep the machine code in their caches, keyed by these files.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

try:
    import fcntl
except ImportError:  # not Unix
    fcntl = None  # type: ignore[assignment]

# Seconds after which a process no longer waits for what another one compiles.
PATIENCE = 60.0


def directory() -> Path:
    """Where generated source lies: SPIKEFUSE_CACHE_DIR, else spikefuse in the user's cache."""
    chosen = os.environ.get("SPIKEFUSE_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spikefuse"


@cache
def _compiler_hash() -> bytes:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


def load(source: str, name: str, language: str) -> ModuleType:
    """Import generated source, writing it first where no process has before.

    Raises:
        OSError: the cache directory can't be written.
    """
    key = hashlib.sha256(_compiler_hash() + source.encode()).hexdigest()[:20]
    module_name = f"spikefuse_{language}_{name.lower()}_{key}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    path = directory() / f"{module_name}.py"
    if not path.exists():
        _write(path, source)
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Triton finds a kernel's source through sys.modules while the module is executed.
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


_locked: set[str] = set()


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """A block that one process at a time runs for a file, where the system can tell; within it,
    other blocks for the file belong to it. For one thread at a time.

    Processes that start together need the same kernels: the first compiles them, the others find
    them in the cache.
    """
    if fcntl is None or path in _locked:
        yield
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context(open(path, "rb"))
            _wait_for(file.fileno())
        _locked.add(path)
        try:
            yield
        finally:
            _locked.discard(path)


def _wait_for(descriptor: int) -> None:
    """Lock an open file, which closing it unlocks."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)


def _write(path: Path, source: str) -> None:
    """Write atomically: another process sees the whole file or none."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            file.write(source)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise OSError(
            f"can't write generated kernels to {path.parent}: {error.strerror}; set "
            "SPIKEFUSE_CACHE_DIR to a folder that can be written"
        ) from error
