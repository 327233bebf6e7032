"""CIFAR-10: 50000 + 10000 colour images of 32 x 32 pixels, as binary or as pickled batches.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", University of Toronto, 2009.
"""

from __future__ import annotations

import gzip
import io
import pickle
import re
import tarfile
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
import torch

from spikefuse.data.files import (
    CHUNK,
    DataError,
    DownloadSource,
    damaged,
    locate,
    opened,
    read_bytes,
)
from spikefuse.data.images import Images

SHAPE = (3, 32, 32)
CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
VALUES = 3 * 32 * 32
# A batch has 10000 images. A pickled image has a label and the name of a file besides its pixels.
BATCH_BYTES = 10_000 * (VALUES + 1024)
ARCHIVE_BYTES = 8 * BATCH_BYTES  # six batches, the names of the classes, and a text
# Folder inside the archive and ending of the files of each published form.
FORMS = (
    ("cifar-10-batches-bin", ".bin"),
    ("cifar-10-batches-bin", ".bin.gz"),
    ("cifar-10-batches-py", ""),
)
ARCHIVES = ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz")
TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST = "test_batch"

CIFAR10 = DownloadSource(
    "cifar10",
    "https://www.cs.toronto.edu/~kriz/",
    {ARCHIVES[0]: "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
)

# File (for messages) and content of each batch, by name.
Batches = dict[str, tuple[Path, bytes]]


def load_cifar10(directory: Path, download: bool) -> tuple[Images, Images]:
    """Load training and test images from binary batches, Python batches, or a published archive.

    Searched in this order, each in `directory/cifar10`, `directory`, and the archive's own folder
    in either: `data_batch_1.bin` to `test_batch.bin` (or `.bin.gz`), `data_batch_1` to
    `test_batch`, then cifar-10-binary.tar.gz and cifar-10-python.tar.gz, read without unpacking.

    Raises:
        DataError: files are missing or damaged, or the download failed.
    """
    folders = (directory / CIFAR10.name, directory)
    batches = _find_batches(folders)
    if batches is None:
        archives = (folder / name for name in ARCHIVES for folder in folders)
        archive = next((path for path in archives if path.is_file()), None)
        batches = _read_archive(archive or locate(CIFAR10, directory, download)[ARCHIVES[0]])
    images = {name: _parse(content, path) for name, (path, content) in batches.items()}
    pixels = torch.cat([images[name].pixels for name in TRAIN])
    labels = torch.cat([images[name].labels for name in TRAIN])
    return Images(pixels, labels), images[TEST]


def _find_batches(folders: tuple[Path, Path]) -> Batches | None:
    for inner, ending in FORMS:
        for folder in (base / sub for base in folders for sub in ("", inner)):
            paths = {name: folder / f"{name}{ending}" for name in (*TRAIN, TEST)}
            missing = [path.name for path in paths.values() if not path.is_file()]
            if not missing:
                return {name: (path, read_bytes(path, BATCH_BYTES)) for name, path in paths.items()}
            if len(missing) < len(paths):
                present = next(path.name for path in paths.values() if path.is_file())
                raise DataError(
                    f"cifar10: {folder} has {present} but not {missing[0]}: get {ARCHIVES[0]} "
                    f"from {CIFAR10.url}cifar.html and unpack it there"
                )
    return None


class _Bounded:
    """A file that ends in an error after `limit` bytes: headers of tar may claim any size."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile, limit: int) -> None:
        self.file, self.left = file, limit

    def read(self, size: int) -> bytes:
        content = self.file.read(min(size, CHUNK))
        self.left -= len(content)
        if self.left < 0:
            raise ValueError(f"more than {ARCHIVE_BYTES} bytes of content")
        return content


def _read_archive(archive: Path) -> Batches:
    wanted = {f"{name}{ending}": name for name in (*TRAIN, TEST) for ending in ("", ".bin")}
    batches: Batches = {}
    with opened(archive) as file:
        content: Any = _Bounded(file, ARCHIVE_BYTES)
        try:
            with tarfile.open(fileobj=content, mode="r|") as tar:
                for member in tar:
                    name = wanted.get(member.name.rpartition("/")[2])
                    if name is None or not member.isfile():
                        continue
                    if member.issparse() or member.size > BATCH_BYTES or name in batches:
                        raise ValueError(f"{member.name}, {member.size} bytes")
                    part = tar.extractfile(member)
                    assert part is not None  # of a regular file
                    batches[name] = (archive, part.read())
            while content.read(CHUNK):  # to the checksum behind the archive
                pass
        except Exception as error:  # a damaged header may raise anything
            what = " ".join(str(error).split())
            raise damaged(archive, f"not an archive of CIFAR-10: {what}") from error
    if missing := [name for name in (*TRAIN, TEST) if name not in batches]:
        raise damaged(archive, f"it does not contain {missing[0]}")
    return batches


def _parse(content: bytes, path: Path) -> Images:
    """Parse one batch; byte 0x80 begins a pickle, and is never a label in a binary batch."""
    if content[:1] == b"\x80":
        pixels, labels = _unpickle(content, path)
    else:
        if not content or len(content) % (1 + VALUES):
            raise damaged(path, f"{len(content)} bytes are not a multiple of 3073, one record")
        records = np.frombuffer(content, np.uint8).reshape(-1, 1 + VALUES)
        pixels, labels = records[:, 1:], records[:, 0].astype(np.int64)
    if labels.min() < 0 or labels.max() >= len(CLASSES):
        raise damaged(path, f"labels from {labels.min()} to {labels.max()}, expected 0 to 9")
    shaped = torch.from_numpy(pixels.reshape(-1, *SHAPE).copy())
    return Images(shaped, torch.from_numpy(labels))


class _PickledDtype:
    """A dtype of whole numbers. NumPy's own unpickling would read its flags from the file."""

    def __init__(self, code: str | bytes, *_: Any) -> None:
        code = code.decode() if isinstance(code, bytes) else code
        if not re.fullmatch("[iu][1248]", code):
            raise pickle.UnpicklingError(f"an array of {code[:40]!r} is refused")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: tuple) -> None:
        self.dtype = self.dtype.newbyteorder(state[1])


class _PickledArray:
    """An array whose shape fits its content. NumPy would allocate any shape in a file."""

    def __init__(self, *_: Any) -> None:
        self.array = np.empty(0)

    def __setstate__(self, state: tuple) -> None:
        _, shape, kind, fortran, content = state
        self.array = np.frombuffer(content, kind.dtype).reshape(
            shape, order="F" if fortran else "C"
        )


# NumPy 1, which wrote the published files, and NumPy 2 name the module differently.
ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
    ("numpy._core.multiarray", "_reconstruct"): _PickledArray,
    ("numpy", "ndarray"): None,  # an argument of _reconstruct
    ("numpy", "dtype"): _PickledDtype,
}


BYTEARRAY = pickle.BYTEARRAY8[0]


# The pure-Python unpickler: the one in C allocates gigabytes for a damaged memo index.
class _ArrayUnpickler(pickle._Unpickler):
    """Unpickles arrays of whole numbers and containers, and refuses to call anything else."""

    # A bytearray is allocated with the size that the file claims.
    dispatch: ClassVar = {k: f for k, f in pickle._Unpickler.dispatch.items() if k != BYTEARRAY}

    def find_class(self, module: str, name: str) -> Any:
        try:
            return ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is refused") from None


def _unpickle(content: bytes, path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        batch = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
        # The published files were written by Python 2 and have bytes as keys.
        batch = {k.decode() if isinstance(k, bytes) else k: v for k, v in batch.items()}
        pixels, labels = batch["data"].array, batch["labels"]
        if isinstance(labels, list) and not all(type(label) is int for label in labels):
            raise ValueError("a label is not a whole number")  # nested lists may expand
        labels = np.asarray(getattr(labels, "array", labels), np.int64)
    except Exception as error:  # a damaged pickle may raise anything
        raise damaged(path, f"not a CIFAR-10 batch: {error}") from error
    if (
        pixels.dtype != np.uint8
        or labels.ndim != 1
        or not len(labels)
        or pixels.shape != (len(labels), VALUES)
    ):
        raise damaged(path, "expected uint8 data [N, 3072] and N labels")
    return pixels, labels
