"""MNIST and Fashion-MNIST from small files, and from the real ones if available."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from spikefuse import data
from tests.data.writing import real_data

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


def test_a_missing_file_is_named_with_the_ways_to_get_it(tmp_path: Path) -> None:
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
