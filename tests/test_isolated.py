"""The process that reads files, and its limits."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import signal
import time
from pathlib import Path

import pytest

from spikefuse import isolated

h5py = pytest.importorskip("h5py")
READERS = {
    "raise OverflowError('a\\nb')": "OverflowError: a b",
    "os.abort()": "h5py crashes",
    "os._exit(1)": "its process ended with status 1",
    "bytearray(1 << 30)": "MemoryError",
    "while True: pass": "an array takes more than 1 seconds",
    "yield from 300 * [np.zeros(1 << 13)]": "more than 16777216 bytes of content",
    "yield np.array([{}])": "elements of type object",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = [1, 2]
    return tmp_path / "a.h5"


def reader(folder: Path, *lines: str) -> Path:
    program = folder / "reader.py"
    body = "".join(f"    {line}\n" for line in lines)
    program.write_text(f"import os\nimport numpy as np\ndef read(file):\n{body}")
    return program


@pytest.mark.parametrize("line", READERS)
def test_readers_that_fail(path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setattr(isolated, "SECONDS", 1.0)
    monkeypatch.setattr(isolated, "MIN_BYTES", 1 << 24)
    program = reader(path.parent, "yield file['x'][()]", line, "yield np.ones(1)")
    with pytest.raises(ValueError, match=re.escape(READERS[line])):
        list(isolated.arrays(program, "h5py", path))


def test_the_reader_of_the_arrays_may_take_any_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated, "SECONDS", 1.0)
    program = reader(path.parent, "for i in range(3): yield np.full(1 << 20, i)")
    found = []
    for array in isolated.arrays(program, "h5py", path):  # each fills the pipe
        time.sleep(0.6)
        found.append(int(array[-1]))
    assert found == [0, 1, 2]


def test_one_process_reads_several_files(path: Path) -> None:
    """A new one takes the place of one that ends, or whose arrays are not asked for."""
    fails = path.parent / "fails.py"
    fails.write_text("def read(file): return file['y']")
    ends = path.parent / "ends.py"
    ends.write_text("import os\ndef read(file): os.abort()")
    program = reader(path.parent, "yield file['x'][()]", "yield np.array(os.getpid())")
    with isolated.one_process():
        (x, first), (_, again) = (isolated.arrays(program, "h5py", path) for _ in range(2))
        assert x.tolist() == [1, 2]
        with pytest.raises(ValueError, match="KeyError"):
            next(isolated.arrays(fails, "h5py", path))
        with isolated.one_process():
            _, third = isolated.arrays(program, "h5py", path)
        assert first == again == third != os.getpid()
        with pytest.raises(ValueError, match="h5py crashes"):
            next(isolated.arrays(ends, "h5py", path))
        next(isolated.arrays(program, "h5py", path))
        _, second = isolated.arrays(program, "h5py", path)
        assert second != first
        (process,) = isolated._waiting
        assert process.pid == second
    assert process.returncode == -signal.SIGKILL


def test_files_read_at_once_have_a_process_each(path: Path) -> None:
    program = reader(path.parent, "yield file['x'][()]", "yield np.array(os.getpid())")
    with isolated.one_process():
        pairs = zip(*(isolated.arrays(program, "h5py", path) for _ in range(2)), strict=True)
        (x, y), (first, second) = pairs
        assert x.tolist() == y.tolist() == [1, 2]
        assert first != second


def test_sizes_that_a_file_claims(path: Path) -> None:
    with h5py.File(path, "a") as file:
        file.create_dataset("a/b", (1 << 40,), "f8", chunks=(1024,))
    with pytest.raises(ValueError, match="more than 268435456 bytes of content"):
        next(isolated.arrays(reader(path.parent, "yield file['x'][()]"), "h5py", path))


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="sets the limit of another process")
def test_a_limit_of_the_user_stays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "MIN_BYTES", 1 << 40)
    program = reader(path.parent, "import resource", "yield resource.getrlimit(resource.RLIMIT_AS)")
    with isolated.one_process():
        isolated._waiting.append(process := isolated._start())
        limits = 1 << 34, 1 << 34
        resource.prlimit(process.pid, resource.RLIMIT_AS, limits)
        (found,) = isolated.arrays(program, "h5py", path)
        assert tuple(found) == limits


def test_a_user_without_pages_for_pipes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    (x,) = isolated.arrays(reader(path.parent, "yield file['x'][()]"), "h5py", path)
    assert x.tolist() == [1, 2]


def test_files_that_are_not_read(tmp_path: Path) -> None:
    program = reader(tmp_path, "yield from ()")
    with pytest.raises(FileNotFoundError, match=r"nothing\.h5"):
        next(isolated.arrays(program, "h5py", tmp_path / "nothing.h5"))
    with pytest.raises(ValueError, match="not an HDF5 file"):
        next(isolated.arrays(program, "h5py", program))
    os.mkfifo(tmp_path / "fifo.h5")
    with pytest.raises(ValueError, match="it is not a regular file"):
        next(isolated.arrays(program, "h5py", tmp_path / "fifo.h5"))
