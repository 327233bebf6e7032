"""Generated source on disk: written once, imported as modules, found again by later processes.

The name of a file is the hash of everything that shapes the machine code besides the machine:
the generated source (hence the definition, as traced) and the compiler's own source. Numba and
Triton keep the machine code in their caches, keyed by these files.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType


def directory() -> Path:
    """Where generated source lies: SPIKEFUSE_CACHE_DIR, else spikefuse in the user's cache."""
    chosen = os.environ.get("SPIKEFUSE_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spikefuse"


@cache
def _compiler_hash() -> bytes:
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for folder in ("compiler", "kernels", "scan"):
        for path in sorted((package / folder).glob("*.py")):
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
