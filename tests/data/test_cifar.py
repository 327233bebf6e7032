"""CIFAR-10 and CIFAR-100 in every published form, and real images if available."""

from __future__ import annotations

import gzip
import os
import pickle
import shutil
import struct
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from spikefuse import data
from spikefuse.data import cifar
from spikefuse.data.cifar import CIFAR10
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


def write100(folder: Path, form: str) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Write CIFAR-100 as "bin", "py", "bin.tar" or "py.tar"; return pixels, coarse, fine labels."""
    python, rng = form.startswith("py"), np.random.default_rng(1)
    inner = folder / ("cifar-100-python" if python else "cifar-100-binary")
    inner.mkdir(parents=True)
    written = {}
    for name, num in (("train", 7), ("test", 3)):
        pixels = rng.integers(0, 256, (num, 3072), np.uint8)
        fine = rng.permutation(100)[:num]
        coarse = fine // 5
        written[name] = pixels, coarse, fine
        labels = {b"coarse_labels": coarse.tolist(), b"fine_labels": fine.tolist()}
        content = pickle.dumps({**labels, b"data": pixels}, protocol=4)
        if not python:
            columns = np.stack([coarse, fine], 1).astype(np.uint8)
            content = np.concatenate([columns, pixels], 1).tobytes()
        (inner / (name if python else f"{name}.bin")).write_bytes(content)
    if form.endswith("tar"):
        kind = "python" if python else "binary"
        with tarfile.open(folder / f"cifar-100-{kind}.tar.gz", "w:gz") as tar:
            tar.add(inner, inner.name)
        shutil.rmtree(inner)
    return written


@pytest.mark.parametrize("form", ["bin", "py", "bin.tar", "py.tar"])
@pytest.mark.parametrize("place", ["", "cifar100"])
def test_reads_both_labels_of_cifar100(tmp_path: Path, form: str, place: str) -> None:
    written = write100(tmp_path / place, form)
    for name, column in (("cifar100", 2), ("cifar100_coarse", 1)):
        for images, part in zip(data.load(name, tmp_path), ("train", "test"), strict=True):
            pixels = written[part][0].reshape(-1, 3, 32, 32)
            np.testing.assert_array_equal(images.pixels.numpy(), pixels)
            assert images.labels.tolist() == written[part][column].tolist()


def test_damaged_files_of_cifar100_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        data.DataError, match=r"cifar-100-binary\.tar\.gz is neither in .*--download"
    ):
        data.load("cifar100", tmp_path)
    write100(tmp_path, "bin")
    path = tmp_path / "cifar-100-binary" / "train.bin"
    content = path.read_bytes()
    for changed, what in (
        (content[:-1], "not a multiple of 3074, one record"),
        (b"\x13\x64" + content[2:], "fine_labels from .* to 100, expected 0 to 99"),
    ):
        path.write_bytes(changed)
        with pytest.raises(data.DataError, match=what) as caught:
            data.load("cifar100", tmp_path)
        assert str(path) in str(caught.value)
    path.write_bytes(b"\x14" + content[1:])
    with pytest.raises(data.DataError, match=r"coarse_labels from .* to 20, expected 0 to 19"):
        data.load("cifar100_coarse", tmp_path)


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


def python2(dtype: bytes, pixels: bytes) -> bytes:
    """One image, pickled as in the published files: by Python 2, with an array of a dtype."""
    text = b"U\x01b"
    return b"".join(
        (
            *(b"\x80\x02}(U\x06labels]K\x07aU\x04data", b"cnumpy.core.multiarray\n_reconstruct\n"),
            *(b"(cnumpy\nndarray\nK\x00\x85", text, b"tR(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\n("),
            *(dtype, b"K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"),
            *(b"T", struct.pack("<I", len(pixels)), pixels, b"tbu."),
        )
    )


def test_a_batch_of_python_2_is_read(tmp_path: Path) -> None:
    pixels = bytes(range(256)) * 12
    images = cifar._parse(CIFAR10, "labels", tmp_path / "batch", python2(b"U\x02u1", pixels))
    assert images.labels.tolist() == [7]
    assert images.pixels.numpy().tobytes() == pixels


# NumPy takes the bytes of an array of objects for addresses.
OBJECTS = {"O": b"U\x01O", "a: O": b"](U\x01aU\x01O\x86e", "bytes": b"U\x02S8", "void": b"U\x02V8"}


@pytest.mark.parametrize("dtype", OBJECTS)
def test_arrays_of_anything_but_numbers_are_refused(tmp_path: Path, dtype: str) -> None:
    content = python2(OBJECTS[dtype], bytes(range(256)) * 12)
    with pytest.raises(data.DataError, match=r"batch is damaged \(not a batch of CIFAR-10"):
        cifar._parse(CIFAR10, "labels", tmp_path / "batch", content)


def expanding() -> bytes:
    """Labels of 10**40 numbers in nested lists."""
    labels: list = [1]
    for _ in range(40):
        labels = [labels] * 10
    return pickle.dumps({b"labels": labels, b"data": np.zeros((1, 3072), np.uint8)})


HUGE = {
    "bytearray of 1 TB": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".",
    "nested labels": expanding(),
}


@pytest.mark.parametrize("kind", HUGE)
def test_small_pickles_stay_small(tmp_path: Path, kind: str) -> None:
    with pytest.raises(data.DataError, match=r"batch is damaged \(not a batch of CIFAR-10"):
        cifar._parse(CIFAR10, "labels", tmp_path / "batch", HUGE[kind])


@pytest.mark.parametrize("form", ["bin.tar", "py.tar"])
def test_a_changed_byte_of_an_archive_never_changes_what_is_read(tmp_path: Path, form: str) -> None:
    write(tmp_path, form)
    (archive,) = tmp_path.glob("*.tar.gz")
    whole, intact = archive.read_bytes(), cifar._read_archive(CIFAR10, archive)
    places = [*range(64), *range(64, len(whole), 499), *range(len(whole) - 64, len(whole))]
    refused = 0
    for place in places:
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        archive.write_bytes(content)
        try:
            assert (
                cifar._read_archive(CIFAR10, archive) == intact
            )  # bytes of a header may be unused
        except data.DataError as error:
            named = str(error).startswith(f"{archive} is damaged") and "--download" in str(error)
            refused += named and "\n" not in str(error)
    assert refused > 0.9 * len(places)


def tar_of(*members: tarfile.TarInfo, content: bytes = b"") -> bytes:
    return b"".join(m.tobuf(tarfile.GNU_FORMAT) for m in members) + content


def member(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.size, found.type = size, kind
    return found


ZEROS = bytes(1 << 20)
BOMBS = {
    "a long name": lambda: [tar_of(member("n", 8 << 30, b"L")), *[ZEROS] * 40],
    "a member": lambda: [tar_of(member("data_batch_1", 7 << 30)), *[ZEROS] * 40],
    "another member": lambda: [tar_of(member("readme", 7 << 30)), *[ZEROS] * 40],
    "the end": lambda: [tar_of(member("readme", 0)), *[ZEROS] * 40],
    "sparse": lambda: [tar_of(member("data_batch_1.bin", 512, tarfile.GNUTYPE_SPARSE)), ZEROS],
}


@pytest.mark.parametrize("kind", BOMBS)
def test_an_archive_is_read_up_to_its_known_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(cifar, "ARCHIVE_BYTES", 10 * len(ZEROS))
    archive = tmp_path / "cifar-10-binary.tar.gz"
    with gzip.open(archive, "wb", 1) as file:
        for content in BOMBS[kind]():
            file.write(content)
    tracemalloc.start()
    with pytest.raises(data.DataError, match=r"binary\.tar\.gz is damaged"):
        cifar._read_archive(CIFAR10, archive)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * cifar.ARCHIVE_BYTES  # of 40 or more that it claims and holds


def label_ten(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    return binary(pixels, labels * 0 + 10)


DAMAGED = {
    "cut": (lambda p, y: binary(p, y)[:-1], "not a multiple of 3073"),
    "empty": (lambda p, y: b"", "not a multiple of 3073"),
    "label": (label_ten, "labels from 10 to 10"),
    "pickle cut": (lambda p, y: pickled(p, y)[:-40], "not a batch of CIFAR-10"),
    "pickle shape": (lambda p, y: pickled(p[:, :9], y), "expected uint8 data"),
    "pickle type": (lambda p, y: pickled(p.astype(float), y), "an array of 'f8' is refused"),
    "too many": (lambda p, y: bytes(CIFAR10.batch_bytes + 1), "more than 40960000 bytes"),
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
