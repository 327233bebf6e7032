"""CIFAR-10 and CIFAR-100: 50000 + 10000 colour images of 32 x 32 pixels, binary or pickled.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", University of Toronto, 2009.
"""

from __future__ import annotations

import io
import pickle
import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from spikefuse.data.files import DataError, DownloadSource, damaged, locate, read_bytes
from spikefuse.data.images import Images

SHAPE = (3, 32, 32)
CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
# The superclasses of CIFAR-100 with their five classes each.
SUPERCLASSES = {
    "aquatic mammals": ("beaver", "dolphin", "otter", "seal", "whale"),
    "fish": ("aquarium fish", "flatfish", "ray", "shark", "trout"),
    "flowers": ("orchid", "poppy", "rose", "sunflower", "tulip"),
    "food containers": ("bottle", "bowl", "can", "cup", "plate"),
    "fruit and vegetables": ("apple", "mushroom", "orange", "pear", "sweet pepper"),
    "household electrical devices": ("clock", "keyboard", "lamp", "telephone", "television"),
    "household furniture": ("bed", "chair", "couch", "table", "wardrobe"),
    "insects": ("bee", "beetle", "butterfly", "caterpillar", "cockroach"),
    "large carnivores": ("bear", "leopard", "lion", "tiger", "wolf"),
    "large man-made outdoor things": ("bridge", "castle", "house", "road", "skyscraper"),
    "large natural outdoor scenes": ("cloud", "forest", "mountain", "plain", "sea"),
    "large omnivores and herbivores": ("camel", "cattle", "chimpanzee", "elephant", "kangaroo"),
    "medium-sized mammals": ("fox", "porcupine", "possum", "raccoon", "skunk"),
    "non-insect invertebrates": ("crab", "lobster", "snail", "spider", "worm"),
    "people": ("baby", "boy", "girl", "man", "woman"),
    "reptiles": ("crocodile", "dinosaur", "lizard", "snake", "turtle"),
    "small mammals": ("hamster", "mouse", "rabbit", "shrew", "squirrel"),
    "trees": ("maple tree", "oak tree", "palm tree", "pine tree", "willow tree"),
    "vehicles 1": ("bicycle", "bus", "motorcycle", "pickup truck", "train"),
    "vehicles 2": ("lawn mower", "rocket", "streetcar", "tank", "tractor"),
}
# Labels number both in alphabetical order.
CLASSES100 = tuple(sorted(name for names in SUPERCLASSES.values() for name in names))
VALUES = 3 * 32 * 32
URL = "https://www.cs.toronto.edu/~kriz/"
# A pickled image has its labels and the name of a file besides its pixels.
IMAGE_BYTES = VALUES + 1024
ARCHIVE_BYTES = 80_000 * IMAGE_BYTES  # 60000 images, the names of the classes, and a text


@dataclass(frozen=True)
class CifarFiles(DownloadSource):
    """How a dataset is published.

    Args:
        name, url, sha256: of the archive of binary batches; that of the pickled ones has "python"
            for "binary" in its name.
        folders: of the batches in the two archives, binary and pickled.
        batches: names of those for training, of 50,000 images together, and of that for the test.
        labels: number of classes of each label of an image, by its name in a pickled batch, in the
            order of the bytes of a binary one.
    """

    folders: tuple[str, str]
    batches: tuple[str, ...]
    labels: Mapping[str, int]

    @property
    def archive(self) -> str:
        return next(iter(self.sha256))

    @property
    def batch_bytes(self) -> int:
        """Most bytes of a batch."""
        return 50_000 // (len(self.batches) - 1) * IMAGE_BYTES

    @property
    def title(self) -> str:
        return self.name.upper().replace("CIFAR", "CIFAR-")


CIFAR10 = CifarFiles(
    "cifar10",
    URL,
    {"cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
    folders=("cifar-10-batches-bin", "cifar-10-batches-py"),
    batches=(*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"),
    labels={"labels": 10},
)
CIFAR100 = CifarFiles(
    "cifar100",
    URL,
    {"cifar-100-binary.tar.gz": "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"},
    folders=("cifar-100-binary", "cifar-100-python"),
    batches=("train", "test"),
    labels={"coarse_labels": 20, "fine_labels": 100},
)

# File (for messages) and content of each batch, by name.
Batches = dict[str, tuple[Path, bytes]]


def load_cifar(
    files: CifarFiles, label: str, directory: Path, download: bool
) -> tuple[Images, Images]:
    """Load training and test images from binary batches, Python batches, or a published archive.

    Searched in this order, each in `directory/<name>`, `directory`, and the archive's own folder in
    either, for CIFAR-10: `data_batch_1.bin` to `test_batch.bin` (or `.bin.gz`), `data_batch_1` to
    `test_batch`, then cifar-10-binary.tar.gz and cifar-10-python.tar.gz, read without unpacking;
    for CIFAR-100, `train.bin` and `test.bin`, `train` and `test`, and its two archives.

    Args:
        files: `CIFAR10` or `CIFAR100`.
        label: which of its labels to return.
    """
    folders = (directory / files.name, directory)
    batches = _find_batches(files, folders)
    if batches is None:
        names = (files.archive, files.archive.replace("binary", "python"))
        archives = (folder / name for name in names for folder in folders)
        archive = next((path for path in archives if path.is_file()), None)
        archive = archive or locate(files, directory, download)[files.archive]
        batches = _read_archive(files, archive)
    *training, test = (_parse(files, label, *batches[name]) for name in files.batches)
    pixels = torch.cat([images.pixels for images in training])
    labels = torch.cat([images.labels for images in training])
    return Images(pixels, labels), test


load_cifar10 = partial(load_cifar, CIFAR10, "labels")
load_cifar100 = partial(load_cifar, CIFAR100, "fine_labels")
load_cifar100_coarse = partial(load_cifar, CIFAR100, "coarse_labels")


def _find_batches(files: CifarFiles, folders: tuple[Path, Path]) -> Batches | None:
    limit = files.batch_bytes
    binary, pickled = files.folders
    for inner, ending in ((binary, ".bin"), (binary, ".bin.gz"), (pickled, "")):
        for folder in (base / sub for base in folders for sub in ("", inner)):
            paths = {name: folder / f"{name}{ending}" for name in files.batches}
            missing = [path.name for path in paths.values() if not path.is_file()]
            if not missing:
                return {name: (path, read_bytes(path, limit)) for name, path in paths.items()}
            if len(missing) < len(paths):
                present = next(path.name for path in paths.values() if path.is_file())
                raise DataError(
                    f"{files.name}: {folder} has {present} but not {missing[0]}: get "
                    f"{files.archive} from {URL}cifar.html and unpack it there"
                )
    return None


def _read_archive(files: CifarFiles, archive: Path) -> Batches:
    wanted = {f"{name}{ending}": name for name in files.batches for ending in ("", ".bin")}
    batches: Batches = {}
    content = io.BytesIO(read_bytes(archive, ARCHIVE_BYTES))
    try:
        with tarfile.open(fileobj=content, mode="r:") as tar:
            for member in tar:
                name = wanted.get(member.name.rpartition("/")[2])
                if name is None or not member.isfile():
                    continue
                if member.issparse() or member.size > files.batch_bytes or name in batches:
                    raise ValueError(f"{member.name}, {member.size} bytes")
                part = tar.extractfile(member)
                assert part is not None  # of a regular file
                batches[name] = (archive, part.read())
    except Exception as error:  # a damaged header may raise anything
        what = " ".join(str(error).split())
        raise damaged(archive, f"not an archive of {files.title}: {what}") from error
    if missing := [name for name in files.batches if name not in batches]:
        raise damaged(archive, f"it does not contain {missing[0]}")
    return batches


def _parse(files: CifarFiles, label: str, path: Path, content: bytes) -> Images:
    """Parse one batch; byte 0x80 begins a pickle, and is never a label in a binary batch."""
    if content[:1] == b"\x80":
        pixels, labels = _unpickle(files, label, path, content)
    else:
        size = len(files.labels) + VALUES
        if not content or len(content) % size:
            raise damaged(path, f"{len(content)} bytes are not a multiple of {size}, one record")
        records = np.frombuffer(content, np.uint8).reshape(-1, size)
        column = list(files.labels).index(label)
        pixels, labels = records[:, -VALUES:], records[:, column].astype(np.int64)
    if labels.min() < 0 or labels.max() >= files.labels[label]:
        found = f"{label} from {labels.min()} to {labels.max()}"
        raise damaged(path, f"{found}, expected 0 to {files.labels[label] - 1}")
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


def _unpickle(
    files: CifarFiles, label: str, path: Path, content: bytes
) -> tuple[np.ndarray, np.ndarray]:
    try:
        batch = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
        # The published files were written by Python 2 and have bytes as keys.
        batch = {k.decode() if isinstance(k, bytes) else k: v for k, v in batch.items()}
        pixels, labels = batch["data"].array, batch[label]
        if isinstance(labels, list) and not all(type(value) is int for value in labels):
            raise ValueError("a label is not a whole number")  # nested lists may expand
        labels = np.asarray(getattr(labels, "array", labels), np.int64)
    except Exception as error:  # a damaged pickle may raise anything
        raise damaged(path, f"not a batch of {files.title}: {error}") from error
    if (
        pixels.dtype != np.uint8
        or labels.ndim != 1
        or not len(labels)
        or pixels.shape != (len(labels), VALUES)
    ):
        raise damaged(path, "expected uint8 data [N, 3072] and N labels")
    return pixels, labels
