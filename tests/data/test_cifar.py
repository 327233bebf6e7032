"""CIFAR-10 in every published form, and the real images if available."""

from __future__ import annotations

import gzip
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from spikefuse import data
from tests.data.writing import real, real_data

NAMES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def batches(num: int = 6) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Pixels [N, 3072] and labels of each batch."""
    rng = np.random.default_rng(0)
    return {
        name: (rng.integers(0, 256, (num, 3072), np.uint8), rng.integers(0, 10, num))
        for name in NAMES
    }


def binary(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    return np.concatenate([labels[:, None].astype(np.uint8), pixels], 1).tobytes()


def pickled(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    """Like the published files, whose keys are bytes."""
    batch = {b"batch_label": b"testing", b"labels": labels.tolist(), b"data": pixels}
    return pickle.dumps({**batch, b"filenames": [b"a.png"] * len(labels)}, protocol=4)


def write(folder: Path, form: str) -> None:
    """The six batches as "bin", "bin.gz", "py", "bin.tar" or "py.tar"."""
    python = form.startswith("py")
    inner = folder / ("cifar-10-batches-py" if python else "cifar-10-batches-bin")
    inner.mkdir(parents=True)
    for name, (pixels, labels) in batches().items():
        content = pickled(pixels, labels) if python else binary(pixels, labels)
        ending = "" if python else ".bin"
        if form == "bin.gz":
            content, ending = gzip.compress(content), ".bin.gz"
        (inner / f"{name}{ending}").write_bytes(content)
    if form.endswith("tar"):
        archive = folder / f"cifar-10-{'python' if python else 'binary'}.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(inner, inner.name)
        for path in inner.iterdir():
            path.unlink()
        inner.rmdir()


@pytest.mark.parametrize("form", ["bin", "bin.gz", "py", "bin.tar", "py.tar"])
@pytest.mark.parametrize("place", ["", "cifar10"])
def test_reads_every_published_form(tmp_path: Path, form: str, place: str) -> None:
    write(tmp_path / place, form)
    train, test = data.load("cifar10", tmp_path)
    written = batches()
    pixels = np.concatenate([written[name][0] for name in NAMES[:5]])
    labels = np.concatenate([written[name][1] for name in NAMES[:5]])
    assert train.pixels.dtype == torch.uint8
    np.testing.assert_array_equal(train.pixels.numpy(), pixels.reshape(-1, 3, 32, 32))
    assert train.labels.tolist() == labels.tolist()
    assert test.labels.tolist() == written["test_batch"][1].tolist()


class Harmful:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("harm",)


def test_pickles_that_call_functions_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "py")
    path = tmp_path / "cifar-10-batches-py" / "data_batch_2"
    path.write_bytes(pickle.dumps({b"labels": [1], b"data": Harmful()}))
    with pytest.raises(data.DataError, match=r"data_batch_2 is damaged .*mkdir is refused"):
        data.load("cifar10", tmp_path)
    assert not (tmp_path / "harm").exists()


def label_ten(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    return binary(pixels, labels * 0 + 10)


DAMAGED = {
    "cut": (lambda p, y: binary(p, y)[:-1], "not a multiple of 3073"),
    "empty": (lambda p, y: b"", "not a multiple of 3073"),
    "label": (label_ten, "labels from 10 to 10"),
    "pickle cut": (lambda p, y: pickled(p, y)[:-40], "not a CIFAR-10 batch"),
    "pickle shape": (lambda p, y: pickled(p[:, :9], y), "expected uint8 data"),
    "pickle type": (lambda p, y: pickled(p.astype(float), y), "expected uint8 data"),
    "gzip": (lambda p, y: gzip.compress(binary(p, y))[:-4], "gzip: "),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_named(tmp_path: Path, kind: str) -> None:
    write(tmp_path, "bin")
    damage, what = DAMAGED[kind]
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    path.write_bytes(damage(*batches()["data_batch_3"]))
    with pytest.raises(data.DataError, match=what) as caught:
        data.load("cifar10", tmp_path)
    assert str(path) in str(caught.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        data.DataError, match=r"cifar-10-binary\.tar\.gz is neither in .*--download"
    ):
        data.load("cifar10", tmp_path)
    write(tmp_path, "bin.tar")
    archive = tmp_path / "cifar-10-binary.tar.gz"
    archive.write_bytes(archive.read_bytes()[:3000])
    with pytest.raises(data.DataError, match=r"cifar-10-binary\.tar\.gz is damaged"):
        data.load("cifar10", tmp_path)
    write(tmp_path, "bin")
    (tmp_path / "cifar-10-batches-bin" / "data_batch_4.bin").unlink()
    with pytest.raises(data.DataError, match=r"has data_batch_1\.bin but not data_batch_4\.bin"):
        data.load("cifar10", tmp_path)


@real_data
def test_real_images(tmp_path: Path) -> None:
    """Write real images of CIFAR-10 in its binary layout, distributed over the batches."""
    content = gzip.decompress(real("cifar10/cifar10_train_0000-3999.bin.gz").read_bytes())
    for i in range(5):
        part = content[3073 * 800 * i : 3073 * 800 * (i + 1)]
        (tmp_path / f"data_batch_{i + 1}.bin").write_bytes(part)
    held_out = real("cifar10/cifar10_test_every10th_1000.bin.gz").read_bytes()
    (tmp_path / "test_batch.bin").write_bytes(gzip.decompress(held_out))
    train, test = data.load("cifar10", tmp_path)
    assert (len(train), len(test)) == (4000, 1000)
    assert train.labels[:8].tolist() == [6, 9, 9, 4, 1, 1, 2, 7]
    assert test.labels[:8].tolist() == [3, 0, 7, 6, 4, 9, 7, 2]
    counts = [396, 366, 420, 384, 422, 393, 414, 385, 407, 413]
    assert train.labels.bincount().tolist() == counts
    # Red, green and blue of the whole training set: 0.4914, 0.4822, 0.4465.
    means = train.pixels.float().mean((0, 2, 3)) / 255
    assert (means - torch.tensor([0.4914, 0.4822, 0.4465])).abs().max() < 0.01
