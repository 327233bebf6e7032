"""The IDX format of MNIST and its relatives.

Two zero bytes, one byte for the element type, one for the number of dimensions, each dimension
as a big-endian uint32, then the elements, big-endian, last dimension fastest.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path

import numpy as np

from spikefuse.data.files import damaged, read_bytes

DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: str | os.PathLike[str]) -> np.ndarray:
    """Read an IDX file, gzip-compressed or not, whatever its name.

    Returns:
        A read-only array with the file's shape and element type.

    Raises:
        DataError: the file is missing, truncated, corrupt, or has another format.
    """
    path = Path(path)
    content = read_bytes(path)
    if len(content) < 4:
        raise damaged(path, f"{len(content)} bytes are too few for an IDX header")
    zeros, code, ndim = struct.unpack_from(">HBB", content)
    if zeros or code not in DTYPES or not ndim:
        raise damaged(path, f"an IDX file does not begin with {content[:4].hex(' ')}")
    start = 4 + 4 * ndim
    if len(content) < start:
        raise damaged(path, f"{len(content)} bytes are too few for a header of {ndim} dimensions")
    shape = struct.unpack_from(f">{ndim}I", content, 4)
    dtype = np.dtype(DTYPES[code])
    expected = start + math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        kind = "truncated" if len(content) < expected else "too long"
        size = f"{len(content)} bytes, expected {expected} for shape {list(shape)}"
        raise damaged(path, f"{kind}: {size}")
    return np.frombuffer(content, dtype, offset=start).reshape(shape)
