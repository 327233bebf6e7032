"""CIFAR-10: 50000 + 10000 colour images of 32 x 32 pixels, as binary or as pickled batches.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", University of Toronto, 2009.
"""

from __future__ import annotations

import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spikefuse.data.errors import DataError
from spikefuse.data.files import ENVIRONMENT, Source, damaged, locate, read_bytes
from spikefuse.data.images import Images

SHAPE = (3, 32, 32)
CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
VALUES = 3 * 32 * 32
BINARY, PYTHON = "cifar-10-batches-bin", "cifar-10-batches-py"
TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST = "test_batch"

CIFAR10 = Source(
    "cifar10",
    "https://www.cs.toronto.edu/~kriz/",
    {
        "cifar-10-binary.tar.gz": (
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
        )
    },
)


def load_cifar10(directory: Path, download: bool) -> tuple[Images, Images]:
    """Training and test images from binary batches, Python batches, or a published archive.

    Looked for in this order, each in `directory`, its subfolder cifar10, and the archive's own
    folder in either: `data_batch_1.bin` to `test_batch.bin` (or `.bin.gz`), `data_batch_1` to
    `test_batch`, then cifar-10-binary.tar.gz and cifar-10-python.tar.gz, read without unpacking.

    Raises:
        DataError: files are missing or damaged, or the download failed.
    """
    found = _find_batches(directory) or _find_archive(directory)
    if found is None:
        if not download:
            raise DataError(
                f"cifar10: neither batches (data_batch_1.bin or data_batch_1) nor an archive "
                f"(cifar-10-binary.tar.gz) in {directory / CIFAR10.name} or {directory}: add "
                f"--download to fetch it, or name the folder that has it with --data-dir or "
                f"{ENVIRONMENT}"
            )
        archive = locate(CIFAR10, directory, download)["cifar-10-binary.tar.gz"]
        found = _unpacked(archive)
    parts = {name: _batch(content, path) for name, (path, content) in found.items()}
    pixels = torch.cat([parts[name].pixels for name in TRAIN])
    labels = torch.cat([parts[name].labels for name in TRAIN])
    return Images(pixels, labels), parts[TEST]


# Name of a batch to its file, for messages, and its content.
Batches = dict[str, tuple[Path, bytes]]


def _find_batches(directory: Path) -> Batches | None:
    places = [base / sub for base in (directory / CIFAR10.name, directory) for sub in ("", BINARY)]
    python = [base / sub for base in (directory / CIFAR10.name, directory) for sub in ("", PYTHON)]
    for folders, endings in ((places, (".bin", ".bin.gz")), (python, ("",))):
        for folder in folders:
            paths = {name: _first(folder, name, endings) for name in (*TRAIN, TEST)}
            there = {name: path for name, path in paths.items() if path is not None}
            if len(there) == len(paths):
                return {name: (path, read_bytes(path)) for name, path in there.items()}
            if there:
                missing = next(name for name in paths if name not in there) + endings[0]
                raise DataError(
                    f"cifar10: {folder} has {next(iter(there.values())).name} but not {missing}: "
                    f"fetch cifar-10-binary.tar.gz from {CIFAR10.url}cifar.html and unpack it there"
                )
    return None


def _first(folder: Path, name: str, endings: tuple[str, ...]) -> Path | None:
    candidates = (folder / f"{name}{ending}" for ending in endings)
    return next((path for path in candidates if path.is_file()), None)


def _find_archive(directory: Path) -> Batches | None:
    for name in ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"):
        for folder in (directory / CIFAR10.name, directory):
            if (folder / name).is_file():
                return _unpacked(folder / name)
    return None


def _unpacked(archive: Path) -> Batches:
    wanted = {f"{name}{ending}": name for name in (*TRAIN, TEST) for ending in ("", ".bin")}
    found: Batches = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = wanted.get(member.name.rpartition("/")[2])
                file = tar.extractfile(member) if name and member.isfile() else None
                if name and file:
                    found[name] = (archive, file.read())
    except (tarfile.TarError, EOFError, OSError) as error:
        raise damaged(archive, f"no tar archive: {error}") from error
    if missing := [name for name in (*TRAIN, TEST) if name not in found]:
        raise damaged(archive, f"it does not hold {missing[0]}")
    return found


def _batch(content: bytes, path: Path) -> Images:
    """One batch; a pickle begins with byte 0x80, which is no label of a binary one."""
    if content[:1] == b"\x80":
        pixels, labels = _unpickled(content, path)
    else:
        if not content or len(content) % (1 + VALUES):
            raise damaged(path, f"{len(content)} bytes are no whole number of records of 3073")
        records = np.frombuffer(content, np.uint8).reshape(-1, 1 + VALUES)
        pixels, labels = records[:, 1:], records[:, 0].astype(np.int64)
    if labels.min() < 0 or labels.max() >= len(CLASSES):
        raise damaged(path, f"labels from {labels.min()} to {labels.max()}, expected 0 to 9")
    shaped = torch.from_numpy(pixels.reshape(-1, *SHAPE).copy())
    return Images(shaped, torch.from_numpy(labels))


# What rebuilds an array; its module's name differs between NumPy 1, which wrote the published
# files, and NumPy 2.
REBUILD: Any = np.empty(0).__reduce__()[0]
ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): REBUILD,
    ("numpy._core.multiarray", "_reconstruct"): REBUILD,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class _Arrays(pickle.Unpickler):
    """Unpickles NumPy arrays and built-in containers; anything else is refused, never called."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is refused") from None


def _unpickled(content: bytes, path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        batch = _Arrays(io.BytesIO(content), encoding="bytes").load()
        # Keys are bytes where Python 2 wrote the file, as it did the published ones.
        batch = {k.decode() if isinstance(k, bytes) else k: v for k, v in batch.items()}
        pixels, labels = batch["data"], np.asarray(batch["labels"], np.int64)
    except Exception as error:  # a damaged pickle may raise anything
        raise damaged(path, f"no CIFAR-10 batch: {error}") from error
    if (
        not isinstance(pixels, np.ndarray)
        or pixels.dtype != np.uint8
        or labels.ndim != 1
        or not len(labels)
        or pixels.shape != (len(labels), VALUES)
    ):
        raise damaged(path, "expected uint8 data [N, 3072] and N labels")
    return pixels, labels
