"""Read files in a process of its own, which may fail.

The libraries that read HDF5 files and events crash at some damaged files, never end at others, and
allocate as many bytes as a file claims. So this file is also a program, which has limits of time
and of memory. It does not import spikefuse, so that it starts at once.

The program takes requests from standard input, a line of JSON for each file, and answers by a line
for each array, shape and type, before its bytes. A last line is null, or the text of an error.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import stat
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

SECONDS = 60.0  # that reading one array may take
CHUNK = 1 << 20  # bytes that are written at once, because a timer takes a thread
MIN_BYTES = 1 << 28  # of content, that any file may have
#: Bytes of content for each byte of a file, by library. Events are packed more tightly than arrays.
EXPANSION = {"h5py": 16, "faery": 128}


# Processes that wait for another file, and the number of blocks of `one_process`.
_waiting: list[subprocess.Popen[bytes]] = []
_blocks = 0


@contextmanager
def one_process() -> Iterator[None]:
    """Read the files of a block in one process; another takes its place if a file ends it."""
    global _blocks
    _blocks += 1
    try:
        yield
    finally:
        _blocks -= 1
        while _waiting and not _blocks:
            _end(_waiting.pop())


def arrays(program: Path, library: str, path: str | os.PathLike[str]) -> Generator[np.ndarray]:
    """Yield the arrays that a program finds in a file.

    Args:
        program: a Python file with a function `read`, which takes a path, or of the library "h5py"
            the open `h5py.File`, and yields arrays of numbers or text. It imports nothing of
            spikefuse.
        library: name of the library that it uses.
        path: of the file.

    Raises:
        OSError: the file can't be found, or no process can be started.
        ValueError: it is not a regular file, `read` raises an error, the library crashes or ends
            the process, one array takes more than `SECONDS`, or the content is more than 256 MiB
            and more than `EXPANSION` times the file. The message doesn't name the file.
    """
    about = os.stat(path)
    if not stat.S_ISREG(about.st_mode):  # reading a FIFO would wait
        raise ValueError("it is not a regular file")
    limit = max(MIN_BYTES, EXPANSION[library] * about.st_size)
    request = [str(program), library, os.path.abspath(os.fsdecode(path)), limit, SECONDS]
    process = _waiting.pop() if _waiting else _start()
    assert process.stdin
    assert process.stdout
    is_waiting, start = False, time.monotonic()
    try:
        process.stdin.write(f"{json.dumps(request)}\n".encode())
        process.stdin.flush()
        while (line := process.stdout.readline()).endswith(b"\n"):
            answer = json.loads(line)
            if not isinstance(answer, list):
                is_waiting = True
                if answer is None:
                    return
                raise ValueError(answer)
            shape, kind = answer
            array = np.empty(shape, kind)
            size = process.stdout.readinto(_bytes(array))  # type: ignore[attr-defined]
            if size == array.nbytes:
                yield array
        status, passed = process.wait(), time.monotonic() - start
        if status < 0:
            raise ValueError(f"{library} crashes")
        is_late = status == 1 and passed >= SECONDS  # the exit status of the timer
        late = f"an array takes more than {SECONDS:g} seconds"
        raise ValueError(late if is_late else f"its process ended with status {status}")
    finally:
        if is_waiting and _blocks:
            _waiting.append(process)
        else:
            _end(process)


def _start() -> subprocess.Popen[bytes]:
    # -P: modules beside the program must not hide others of the same name.
    command = [sys.executable, "-P", __file__]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null)
    assert process.stdout
    # Faster, but only Linux has it, and users may have no more pages for pipes.
    with suppress(ImportError, AttributeError, OSError):
        import fcntl

        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, CHUNK)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(OSError):  # of a request that could not be sent
        process.__exit__(None, None, None)


def _bytes(array: np.ndarray) -> memoryview:
    """The memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def _answer() -> None:
    """Answer the requests of standard input."""
    load = cache(runpy.run_path)
    for line in sys.stdin.buffer:
        program, library, path, limit, seconds = json.loads(line)
        answer = None
        try:
            # Before the limit, because libraries reserve memory.
            read = load(program)["read"]
            _limit_memory(2 * limit)
            _write(read, library, path, limit, seconds)
        except BaseException as error:  # libraries may raise anything, also panics of Rust
            kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
            answer = " ".join(f"{kind}{error}".split())
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.buffer.write(f"{json.dumps(answer)}\n".encode())
        sys.stdout.buffer.flush()


def _write(read: Any, library: str, path: str, limit: int, seconds: float) -> None:
    """Write the arrays of a file to standard output."""
    size, num_pending = 0, 0
    pending: list[bytes | memoryview] = []
    with open(os.devnull, "w") as null:
        # Ends the process, also in the middle of a call of the library.
        faulthandler.dump_traceback_later(seconds, exit=True, file=null)
        with _opened(library, path, limit) as file:
            for array in read(file):
                array = np.asarray(array, order="C")
                size += array.nbytes
                if size > limit:
                    raise ValueError(f"more than {limit} bytes of content")
                if array.dtype.kind not in "biufU":
                    raise ValueError(f"elements of type {array.dtype}")
                answer = json.dumps([array.shape, array.dtype.str])
                pending += [f"{answer}\n".encode(), _bytes(array)]
                num_pending += array.nbytes
                if num_pending >= CHUNK:
                    faulthandler.cancel_dump_traceback_later()  # who asks may take any time
                    sys.stdout.buffer.writelines(pending)
                    pending, num_pending = [], 0
                    faulthandler.dump_traceback_later(seconds, exit=True, file=null)
        faulthandler.cancel_dump_traceback_later()
    sys.stdout.buffer.writelines(pending)


def _opened(library: str, path: str, limit: int) -> AbstractContextManager[Any]:
    """Open an HDF5 file, unless its datasets claim more bytes; return other paths."""
    if library != "h5py":
        return nullcontext(path)
    import h5py

    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise ValueError(f"not an HDF5 file: {error}") from error
    parts: list[Any] = []
    file.visititems(lambda name, part: parts.append(part))  # doesn't follow links to other files
    if sum(part.nbytes for part in parts if isinstance(part, h5py.Dataset)) > limit:
        file.close()
        raise ValueError(f"more than {limit} bytes of content")
    opened: AbstractContextManager[Any] = file
    return opened


def _limit_memory(extra: int) -> None:
    """Let the process allocate `extra` bytes more; without effect where there is no /proc."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + extra
    if hard != resource.RLIM_INFINITY:  # such as that of ulimit -v
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


if __name__ == "__main__":
    _answer()
