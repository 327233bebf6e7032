"""Read HDF5 files in a process of its own, which may fail.

The HDF5 library crashes at some damaged files, never ends at others, and allocates as many bytes as
a file claims. So this file is also a program, which has limits of time and of memory. It does not
import spikefuse, so that it starts at once:

    python hdf5.py READER FILE BYTES SECONDS

READER is a Python file with a function `read`, which takes the open `h5py.File` and yields arrays.
The program writes each of them to standard output, in NumPy's format after its length as int64.
"""

from __future__ import annotations

import faulthandler
import io
import os
import runpy
import stat
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np

SECONDS = 60.0  # that reading one array may take
CHUNK = 1 << 20  # bytes that are written at once, because a timer takes a thread
MIN_BYTES, EXPANSION = 1 << 28, 16  # of content: at least, and for each byte of the file


def arrays(reader: Path, path: str | os.PathLike[str]) -> Generator[np.ndarray]:
    """Yield the arrays that a reader finds in a file.

    Args:
        reader: a Python file with a function `read`, as in the description of this module. It
            imports nothing of spikefuse.
        path: of the HDF5 file.

    Raises:
        OSError: the file can't be found.
        ValueError: it is not a regular file or not of HDF5, `read` raises an error, the HDF5
            library crashes, one array takes more than `SECONDS`, or the content is more than 256
            MiB and more than 16 times the file. The message doesn't name the file.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):  # reading a FIFO would wait
        raise ValueError("it is not a regular file")
    limits = max(MIN_BYTES, EXPANSION * status.st_size), SECONDS
    # -P: modules beside the program must not hide others of the same name.
    command = [sys.executable, "-P", __file__, str(reader), os.fspath(path), *map(str, limits)]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        assert process.stdout
        try:
            while len(header := process.stdout.read(8)) == 8:
                size = int.from_bytes(header, "little")
                if len(content := process.stdout.read(size)) < size:
                    break
                yield np.load(io.BytesIO(content), allow_pickle=False)
            if code := process.wait():
                errors.seek(0)
                cause = "the HDF5 library crashes"
                if code == 1:  # without a message: by the timer
                    cause = f"an array takes more than {SECONDS:g} seconds"
                raise ValueError([cause, *errors.read().decode(errors="replace").splitlines()][-1])
        finally:
            process.kill()


def _write(reader: str, path: str, limit: int, seconds: float) -> None:
    """Write the arrays of a file to standard output."""
    import h5py  # before the limit, because libraries reserve memory

    _limit_memory(2 * limit)
    read, size, pending = runpy.run_path(reader)["read"], 0, bytearray()
    with open(os.devnull, "w") as null:
        # Ends the process, also in the middle of a call of the HDF5 library.
        faulthandler.dump_traceback_later(seconds, exit=True, file=null)
        try:
            opened = h5py.File(path, "r")
        except OSError as error:
            raise ValueError(f"not an HDF5 file: {error}") from error
        with opened as file:
            _check_sizes(file, limit)
            for array in read(file):
                size += array.nbytes
                if size > limit:
                    raise ValueError(f"more than {limit} bytes of content")
                content = io.BytesIO()
                np.save(content, array, allow_pickle=False)
                pending += len(content.getvalue()).to_bytes(8, "little") + content.getvalue()
                if len(pending) >= CHUNK:
                    faulthandler.cancel_dump_traceback_later()  # the reader may take any time
                    sys.stdout.buffer.write(pending)
                    pending = bytearray()
                    faulthandler.dump_traceback_later(seconds, exit=True, file=null)
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.buffer.write(pending)


def _check_sizes(file: Any, limit: int) -> None:
    """Refuse data sets that claim more bytes, before they are read."""
    import h5py

    parts: list[Any] = []
    file.visititems(lambda name, part: parts.append(part))  # doesn't follow links to other files
    if sum(part.nbytes for part in parts if isinstance(part, h5py.Dataset)) > limit:
        raise ValueError(f"more than {limit} bytes of content")


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
    try:
        _write(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
    except Exception as error:  # h5py may raise anything
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        sys.exit(" ".join(f"{kind}{error}".split()))
