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
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType

from spikefuse.kernels.cache_folder import FIX, private_directory


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
        OSError: the cache directory can't be written, or another user could have written it.
    """
    key = hashlib.sha256(_compiler_hash() + source.encode()).hexdigest()[:20]
    module_name = f"spikefuse_{language}_{name.lower()}_{key}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    path = private_directory() / f"{module_name}.py"
    _ensure(path, source)
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # Triton finds a kernel's source through sys.modules while the module is executed.
    sys.modules[module_name] = module
    try:
        # The text itself, not what the file or Python's cache of its bytecode may hold by now.
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def unload(module: ModuleType, kernels: Iterable[str]) -> None:
    """Let the machine code of a module's kernels be freed; another `load` finds it on disk.

    Numba holds the variables of a module, and with them its kernels, until these are freed.
    """
    sys.modules.pop(module.__name__, None)
    for name in kernels:
        vars(module).pop(name, None)


def _ensure(path: Path, source: str) -> None:
    """Write a file unless it has this content. Numba and Triton read it."""
    try:
        if path.read_bytes() == source.encode():
            return
        warnings.warn(f"{path} was damaged or edited: it is written again", RuntimeWarning, 3)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise OSError(f"can't read the generated kernels in {path}: {error.strerror}") from error
    _write(path, source)


def _write(path: Path, source: str) -> None:
    """Write atomically: another process sees the whole file or none."""
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(source.encode())
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise OSError(
            f"can't write generated kernels to {path.parent}: {error.strerror}; {FIX} that can be "
            "written"
        ) from error
