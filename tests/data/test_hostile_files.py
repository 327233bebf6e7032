"""Readers given damaged files: they read them or raise an error that names the file."""

from __future__ import annotations

import gzip
import io
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from spikefuse import isolated
from spikefuse.data import files
from spikefuse.data.mnist import read_idx
from tests.data.readers import READERS, limited_memory, mutated, read_speech

MUTATIONS = 200
PROCESSES = {"SHD", "HDF5", "AEDAT 4"}  # which take a second


@pytest.fixture
def _limited_memory() -> Iterator[None]:
    with limited_memory(), isolated.one_process():
        yield


def check(path: Path, content: bytes, read: Callable[[Path], Any]) -> bool:
    """Whether the file is read; otherwise, the error must name it or one that belongs to it."""
    path.write_bytes(content)
    message = ""
    try:
        read(path)
    except (ValueError, OSError) as error:
        message = str(error)
    assert not message or str(path.parent) in message
    return not message


@pytest.mark.usefixtures("_limited_memory")
@pytest.mark.parametrize("kind", READERS)
def test_mutations_are_read_or_named(tmp_path: Path, kind: str) -> None:
    name, make, read = READERS[kind]
    good, rng = make(), random.Random(kind)
    assert check(tmp_path / name, good, read)
    assert not check(tmp_path / name, b"", read)
    for other, (_, make_other, _) in READERS.items():
        if other.partition(",")[0] != kind.partition(",")[0]:  # compressed content is recognized
            check(tmp_path / name, make_other(), read)
    for _ in range(20 if kind in PROCESSES else MUTATIONS):
        check(tmp_path / name, mutated(good, rng), read)


def many_recordings() -> bytes:
    file = io.BytesIO()
    with h5py.File(file, "w") as h5:
        for name, dtype in (("times", np.float16), ("units", np.uint16)):
            kind = h5py.vlen_dtype(dtype)
            h5.create_dataset(f"spikes/{name}", (2**31,), kind, chunks=(100,))
        h5.create_dataset("labels", (2**31,), np.uint16, chunks=(100,))
    return file.getvalue()


def narrow_image() -> bytes:
    file = io.BytesIO()
    Image.new("L", (1_000_000, 1)).save(file, "png")
    return file.getvalue()


PACKET = struct.pack("<hhiiiiii", 1, 1, 8, 4, 0, 2**31 - 1, 2**31 - 1, 2**31 - 1)
CLAIMS = {
    "IDX": b"\0\0\x08\x01" + struct.pack(">I", 2**31),
    "CIFAR-10, pickled": b"\x80\x03Nr" + struct.pack("<I", 2**31) + b".",
    "AEDAT 3": b"#!AER-DAT3.1\r\n#!END-HEADER\r\n" + PACKET,
    "PNG": narrow_image(),
    "SHD": many_recordings(),
    "frames": b"\x93NUMPY\x02\0" + struct.pack("<I", 2**32 - 1),
}


@pytest.mark.usefixtures("_limited_memory")
@pytest.mark.parametrize("kind", CLAIMS)
def test_claimed_sizes_are_not_allocated(tmp_path: Path, kind: str) -> None:
    name, _, read = READERS[kind]
    assert not check(tmp_path / name, CLAIMS[kind], read)


def test_decompressed_content_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_DECOMPRESSED", 2 * files.CHUNK)
    assert check(tmp_path / "a.gz", gzip.compress(bytes(2 * files.CHUNK)), files.read_bytes)
    assert not check(tmp_path / "a.gz", gzip.compress(bytes(2 * files.CHUNK + 1)), files.read_bytes)
    large = b"\0\0\x08\x01" + struct.pack(">I", 3 * files.CHUNK) + bytes(3 * files.CHUNK)
    assert check(tmp_path / "a.idx", large, read_idx)  # limited by the size of the file itself
    assert not check(tmp_path / "a.idx", gzip.compress(large), read_idx)


def test_an_idx_file_is_decompressed_up_to_the_size_in_its_header(tmp_path: Path) -> None:
    content = gzip.compress(b"\0\0\x08\x01" + struct.pack(">I", 1) + bytes(1 << 26), 1)
    tracemalloc.start()
    assert not check(tmp_path / "a.gz", content, read_idx)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24


@pytest.mark.parametrize(
    "dims", [[1] * 255, [0, 2**32 - 1, 2**32 - 1, 2**32 - 1], [2**32 - 1] * 255]
)
def test_an_idx_file_of_absurd_dimensions(tmp_path: Path, dims: list[int]) -> None:
    header = b"\0\0\x08" + struct.pack(f">B{len(dims)}I", len(dims), *dims)
    assert not check(tmp_path / "a.idx", header + b"\1", read_idx)
    assert not check(tmp_path / "a.idx", header, read_idx)


VLEN = h5py.vlen_dtype(np.float32)
HUGE = np.dtype(("f8", (1 << 27,)))


@pytest.mark.usefixtures("_limited_memory")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("labels", h5py.string_dtype()),
        ("labels", [("a", "i4")]),
        ("labels", "S2000000000"),
        ("labels", VLEN),
        ("spikes/times", HUGE),
        ("spikes/units", "S2000000000"),
        ("spikes/times", h5py.vlen_dtype(np.dtype("S2000000000"))),
        ("spikes/units", np.float32),
    ],
)
def test_elements_of_other_types(tmp_path: Path, name: str, dtype: Any) -> None:
    types = {"labels": np.int64, "spikes/times": VLEN, "spikes/units": VLEN}
    for changed in (types, {**types, name: dtype}):
        file = io.BytesIO()
        with h5py.File(file, "w") as h5:
            for key, kind in changed.items():
                h5.create_dataset(key, (3,), kind, chunks=(1,))
        assert check(tmp_path / "a.h5", file.getvalue(), read_speech) == (changed is types)
