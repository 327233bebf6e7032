"""IDX files, and MNIST and Fashion-MNIST from small files, and from the real ones if available."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from spikefuse import data
from spikefuse.data import DataError, read_idx
from tests.data.writing import real_data

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
    "too long": (WHOLE + b"\0", "too long: at least 25 bytes, expected 24"),
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


def test_a_limit_counts_the_bytes_of_the_elements(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(WHOLE)
    assert read_idx(path, limit=12).shape == (3, 4)
    with pytest.raises(DataError, match=r"its header claims 12 bytes, in shape \[3, 4\]"):
        read_idx(path, limit=11)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*nothing: No such file"):
        read_idx(tmp_path / "nothing")


PARTS = {"train": 20, "t10k": 10}


def write_mnist(folder: Path, suffix: str = ".gz") -> None:
    """A dataset of 20 + 10 images whose pixels all equal their label."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in PARTS.items():
        labels = (np.arange(count) % 10).astype(np.uint8)
        pixels = np.broadcast_to(labels[:, None, None], (count, 28, 28))
        images = struct.pack(">HBB3I", 0, 8, 3, *pixels.shape) + pixels.tobytes()
        for name, content in (
            ("images-idx3", images),
            ("labels-idx1", struct.pack(">HBBI", 0, 8, 1, count) + labels.tobytes()),
        ):
            path = folder / f"{part}-{name}-ubyte{suffix}"
            path.write_bytes(gzip.compress(content) if suffix else content)


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
@pytest.mark.parametrize("suffix", [".gz", ""])
@pytest.mark.parametrize("in_subfolder", [True, False])
def test_reads_local_files(tmp_path: Path, name: str, suffix: str, in_subfolder: bool) -> None:
    write_mnist(tmp_path / name if in_subfolder else tmp_path, suffix)
    train, test = data.load(name, tmp_path)
    assert train.pixels.shape == (20, 1, 28, 28)
    assert test.pixels.shape == (10, 1, 28, 28)
    assert train.pixels.dtype == torch.uint8
    assert train.labels.dtype == torch.int64
    assert torch.equal(train.pixels[:, 0, 5, 5], train.labels.to(torch.uint8))


def corrupt_images(folder: Path) -> Path:
    path = folder / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    return path


def swap_labels(folder: Path) -> Path:
    path = folder / "train-labels-idx1-ubyte.gz"
    path.write_bytes((folder / "t10k-labels-idx1-ubyte.gz").read_bytes())
    return path


def labels_as_images(folder: Path) -> Path:
    path = folder / "t10k-images-idx3-ubyte.gz"
    path.write_bytes((folder / "t10k-labels-idx1-ubyte.gz").read_bytes())
    return path


def impossible_label(folder: Path) -> Path:
    path = folder / "t10k-labels-idx1-ubyte.gz"
    content = bytearray(gzip.decompress(path.read_bytes()))
    content[-1] = 10
    path.write_bytes(gzip.compress(bytes(content)))
    return path


@pytest.mark.parametrize(
    "damage", [corrupt_images, swap_labels, labels_as_images, impossible_label]
)
def test_a_wrong_file_is_named(tmp_path: Path, damage) -> None:
    write_mnist(tmp_path)
    path = damage(tmp_path)
    with pytest.raises(data.DataError) as caught:
        data.load("mnist", tmp_path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_is_named_with_instructions(tmp_path: Path) -> None:
    with pytest.raises(data.DataError) as caught:
        data.load("mnist", tmp_path)
    for hint in ("train-images-idx3-ubyte.gz", str(tmp_path), "--download", "--data-dir"):
        assert hint in str(caught.value)


# Label counts and mean pixel, as published.
PUBLISHED = {
    "mnist": ([5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949], 0.1307),
    "fashion_mnist": ([6000] * 10, 0.2860),
}


@real_data
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_real_files(name: str) -> None:
    train, test = data.load(name)
    counts, mean = PUBLISHED[name]
    assert (len(train), len(test)) == (60000, 10000)
    assert train.labels.bincount().tolist() == counts
    assert abs(train.pixels.float().mean().item() / 255 - mean) < 5e-5
