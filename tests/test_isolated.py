"""The process that reads HDF5 files, and its limits."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from spikefuse import hdf5

h5py = pytest.importorskip("h5py")
READERS = {
    "raise OverflowError('a\\nb')": "OverflowError: a b",
    "os.abort()": "the HDF5 library crashes",
    "bytearray(1 << 30)": "MemoryError",
    "while True: pass": "an array takes more than 1 seconds",
    "yield from 300 * [np.zeros(1 << 13)]": "more than 16777216 bytes of content",
    "yield np.array([{}])": "Object arrays cannot be saved",
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
    monkeypatch.setattr(hdf5, "SECONDS", 1.0)
    monkeypatch.setattr(hdf5, "MIN_BYTES", 1 << 24)
    program = reader(path.parent, "yield file['x'][()]", line, "yield np.ones(1)")
    with pytest.raises(ValueError, match=re.escape(READERS[line])):
        list(hdf5.arrays(program, path))


def test_the_reader_of_the_arrays_may_take_any_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hdf5, "SECONDS", 1.0)
    program = reader(path.parent, "for i in range(3): yield np.full(1 << 20, i)")
    found = []
    for array in hdf5.arrays(program, path):  # each fills the pipe
        time.sleep(0.6)
        found.append(int(array[-1]))
    assert found == [0, 1, 2]


def test_sizes_that_a_file_claims(path: Path) -> None:
    with h5py.File(path, "a") as file:
        file.create_dataset("a/b", (1 << 40,), "f8", chunks=(1024,))
    with pytest.raises(ValueError, match="more than 268435456 bytes of content"):
        next(hdf5.arrays(reader(path.parent, "yield file['x'][()]"), path))


def test_files_that_are_not_read(tmp_path: Path) -> None:
    program = reader(tmp_path, "yield from ()")
    with pytest.raises(FileNotFoundError, match=r"nothing\.h5"):
        next(hdf5.arrays(program, tmp_path / "nothing.h5"))
    with pytest.raises(ValueError, match="not an HDF5 file"):
        next(hdf5.arrays(program, program))
    os.mkfifo(tmp_path / "fifo.h5")
    with pytest.raises(ValueError, match="it is not a regular file"):
        next(hdf5.arrays(program, tmp_path / "fifo.h5"))
