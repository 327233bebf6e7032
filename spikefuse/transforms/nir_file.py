"""Read a file of NIR in a process of its own, which may fail.

The HDF5 library crashes at some damaged files, never ends at others, and allocates as many bytes as
a file claims. So this file is also a program, which has limits of time and of memory, and returns
the file's arrays. It does not import spikefuse, so that it starts at once:

    python nir_file.py FILE BYTES
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

SECONDS = 60  # that reading a file may take
MIN_BYTES, EXPANSION = 1 << 28, 16  # of content: at least, and for each byte of the file


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the nested dict of a file's graph, as `nir.dict2NIRNode` takes it.

    Raises:
        OSError: the file can't be read.
        ValueError: it is damaged, or holds more than 256 MiB and more than 16 times its size, or
            reading it takes more than `SECONDS`.
    """
    limit = max(MIN_BYTES, EXPANSION * os.stat(path).st_size)
    # -P: modules beside the program must not hide others of the same name.
    command = [sys.executable, "-P", __file__, os.fspath(path), str(limit)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise _damaged(path, f"reading it takes more than {SECONDS} seconds") from None
    if done.returncode:
        reasons = done.stderr.decode(errors="replace").splitlines()
        raise _damaged(path, ["the HDF5 library crashes", *reasons][-1])
    content: dict[str, Any] = {}
    with np.load(io.BytesIO(done.stdout), allow_pickle=False) as arrays:
        for key in arrays:
            *groups, name = key.split("/")[1:]
            group = content
            for inner in groups:
                group = group.setdefault(inner, {})
            array = arrays[key]
            group[name] = array.item() if array.dtype.kind == "U" and not array.ndim else array[()]
    return content


def _damaged(path: object, what: str) -> ValueError:
    return ValueError(f"{path} is damaged, or not a file of nir.write ({what})")


def _read(path: str, limit: int) -> dict[str, np.ndarray]:
    """Return all arrays below the group "node", by path; links to other files are not followed."""
    import h5py

    arrays: dict[str, np.ndarray] = {}
    parts: dict[str, Any] = {}

    def visit(name: str, part: Any) -> None:
        if isinstance(part, h5py.Dataset):
            parts[name] = part

    with h5py.File(path, "r") as file:
        file["node"].visititems(visit)
        if sum(part.nbytes for part in parts.values()) > limit:
            raise ValueError(f"more than {limit} bytes of content")
        for name, part in parts.items():
            is_text = h5py.check_string_dtype(part.dtype) is not None
            array = np.array(part.asstr()[()], np.str_) if is_text else np.asarray(part[()])
            if array.dtype.kind not in "iufbU":
                raise ValueError(f"{name} has elements of type {array.dtype}")
            arrays[f"/{name}"] = array
    return arrays


def _limit_memory(extra: int) -> None:
    """Let the process allocate `extra` bytes more; without effect where there is no /proc."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return
    limit = pages * resource.getpagesize() + extra
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    file_path, most = sys.argv[1], int(sys.argv[2])
    import h5py  # noqa: F401  before the limit, because libraries reserve memory

    _limit_memory(2 * most)
    try:
        np.savez(sys.stdout.buffer, **_read(file_path, most))  # type: ignore[arg-type]
    except Exception as error:  # h5py may raise anything
        sys.exit(" ".join(f"{type(error).__name__}: {error}".split()))
