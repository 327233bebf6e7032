"""MNIST and Fashion-MNIST: 60000 + 10000 images of 28 x 28 pixels, as IDX files.

An IDX file has two zero bytes, one byte for the element type, one for the number of dimensions,
each dimension as a big-endian uint32, then the elements, big-endian, last dimension fastest.
"""

from __future__ import annotations

import math
import os
import struct
from functools import partial
from pathlib import Path

import numpy as np
import torch

from spikefuse.data.files import (
    DataError,
    DownloadSource,
    damaged,
    locate,
    max_content,
    opened,
    read_up_to,
)
from spikefuse.data.images import Images

TRAIN = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")
TEST = ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")
SIZE = (28, 28)
NUM_CLASSES = 10
DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}

# LeCun, Bottou, Bengio, Haffner, "Gradient-based learning applied to document recognition",
# Proceedings of the IEEE 86(11), 1998.
MNIST = DownloadSource(
    "mnist",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    {
        TRAIN[0]: "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        TRAIN[1]: "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        TEST[0]: "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        TEST[1]: "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    },
)

# Xiao, Rasul, Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
# Algorithms", arXiv:1708.07747.
FASHION_MNIST = DownloadSource(
    "fashion_mnist",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    {
        TRAIN[0]: "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        TRAIN[1]: "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        TEST[0]: "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        TEST[1]: "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    },
)


def read_idx(path: str | os.PathLike[str], limit: int | None = None) -> np.ndarray:
    """Read an IDX file, gzip-compressed or not, whatever its name.

    Example::

        pixels = sf.data.read_idx("t10k-images-idx3-ubyte.gz")  # uint8 [10000, 28, 28]

    Args:
        path: of the file.
        limit: most bytes of the elements; by default 1 GiB, or the file's size if larger.

    Returns:
        A read-only array with the file's shape and element type.

    Raises:
        DataError: the file is missing, truncated, corrupt, has another format, or exceeds `limit`.
    """
    path = Path(path)
    with opened(path) as file:
        start = read_up_to(file, 4)
        if len(start) < 4:
            raise damaged(path, f"{len(start)} bytes are too few for an IDX header")
        zeros, code, ndim = struct.unpack(">HBB", start)
        if zeros or code not in DTYPES or not ndim:
            raise damaged(path, f"an IDX file does not begin with {start.hex(' ')}")
        dims = read_up_to(file, 4 * ndim)
        if len(dims) < 4 * ndim:
            size = 4 + len(dims)
            raise damaged(path, f"{size} bytes are too few for a header of {ndim} dimensions")
        shape, dtype = struct.unpack(f">{ndim}I", dims), np.dtype(DTYPES[code])
        size, header = math.prod(shape) * dtype.itemsize, 4 + 4 * ndim
        if size > (max_content(path) if limit is None else limit):
            raise damaged(path, f"its header claims {size} bytes, in shape {list(shape)}")
        content = read_up_to(file, size + 1)  # one more, to reach the end of the file
    found = f"{header + len(content)} bytes, expected {header + size} for shape {list(shape)}"
    if len(content) < size:
        raise damaged(path, f"truncated: {found}")
    if len(content) > size:
        raise damaged(path, f"too long: at least {found}")
    try:
        return np.frombuffer(content, dtype).reshape(shape)
    except ValueError as error:  # more dimensions than NumPy has, or huge ones beside a zero
        raise damaged(path, f"shape {list(shape)}: {error}") from error


def load(source: DownloadSource, directory: Path, download: bool) -> tuple[Images, Images]:
    """Load training and test images from IDX files, compressed or not.

    Args:
        source: `MNIST` or `FASHION_MNIST`.
        directory: folder of the files, or of a folder `source.name` with them.
    """
    paths = locate(source, directory, download)
    train, test = (_read(paths[images], paths[labels]) for images, labels in (TRAIN, TEST))
    return train, test


def _read(images: Path, labels: Path) -> Images:
    x = read_idx(images)
    if x.dtype != np.uint8 or x.ndim != 3 or x.shape[1:] != SIZE or not len(x):
        raise DataError(
            f"{images} holds {x.dtype} {list(x.shape)}, expected uint8 images [N, 28, 28]: "
            "replace it with the published file"
        )
    y = read_idx(labels, len(x))
    if y.dtype != np.uint8 or y.shape != x.shape[:1] or y.max() >= NUM_CLASSES:
        raise DataError(
            f"{labels} holds {y.dtype} {list(y.shape)}, expected {len(x)} uint8 labels below "
            f"{NUM_CLASSES}, one per image of {images.name}: replace it with the published file"
        )
    # Copied, because torch does not accept read-only arrays.
    return Images(torch.from_numpy(x.copy()).unsqueeze(1), torch.from_numpy(y.astype(np.int64)))


load_mnist = partial(load, MNIST)
load_fashion_mnist = partial(load, FASHION_MNIST)
