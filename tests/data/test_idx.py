"""The IDX reader with valid and damaged files."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from spikefuse.data import DataError, read_idx

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def idx(array: np.ndarray) -> bytes:
    code = CODES[array.dtype.str[1:]]
    header = struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("shape", [(5,), (2, 3, 4), (0, 28, 28)])
@pytest.mark.parametrize("compressed", [False, True])
def test_reads_what_was_written(
    tmp_path: Path, dtype: str, shape: tuple[int, ...], compressed: bool
) -> None:
    written = (np.arange(np.prod(shape)) * 7 % 100).astype(dtype).reshape(shape)
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(idx(written)) if compressed else idx(written))
    read = read_idx(path)
    assert read.shape == shape
    assert read.dtype.newbyteorder("=") == np.dtype(dtype)
    np.testing.assert_array_equal(read, written)


WHOLE = idx(np.zeros((3, 4), np.uint8))

DAMAGED = {
    "empty": (b"", "too few for an IDX header"),
    "text": (b"<html>not found</html>", "does not begin with 3c 68 74 6d"),
    "unknown type": (b"\0\0\x07\x01\0\0\0\0", "does not begin with 00 00 07 01"),
    "no dimensions": (b"\0\0\x08\0", "does not begin with 00 00 08 00"),
    "half a header": (WHOLE[:9], "header of 2 dimensions"),
    "truncated": (WHOLE[:-1], "truncated: 23 bytes, expected 24"),
    "too long": (WHOLE + b"\0", "too long: 25 bytes, expected 24"),
    "gzip cut off": (gzip.compress(WHOLE)[:-3], "gzip: "),
    "gzip corrupt": (gzip.compress(WHOLE)[:-8] + b"\0" * 8, "gzip: "),
    "gzip of rubbish": (b"\x1f\x8b\x08\0\0\0\0\0\0\0" + b"\xff" * 20, "gzip: "),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_named_with_the_fix(tmp_path: Path, kind: str) -> None:
    content, what = DAMAGED[kind]
    path = tmp_path / "images.gz"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_idx(path)
    message = str(caught.value)
    assert str(path) in message
    assert what in message
    assert "--download" in message
    assert "\n" not in message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*nothing: No such file"):
        read_idx(tmp_path / "nothing")
