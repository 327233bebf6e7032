"""Read an HDF5 file of NIR, in the process of spikefuse/isolated.py."""

from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np


def read(file: h5py.File) -> Iterator[np.ndarray]:
    """Yield the paths of all arrays below the group "node", then the arrays.

    Raises:
        ValueError: an array has elements that are neither numbers nor text.
    """
    parts: dict[str, Any] = {}

    def visit(name: str, part: Any) -> None:
        if isinstance(part, h5py.Dataset):
            parts[name] = part

    file["node"].visititems(visit)
    yield np.array([*parts], np.str_)
    for name, part in parts.items():
        is_text = h5py.check_string_dtype(part.dtype) is not None
        array = np.array(part.asstr()[()], np.str_) if is_text else np.asarray(part[()])
        if array.dtype.kind not in "iufbU":
            raise ValueError(f"{name} has elements of type {array.dtype}")
        yield array
