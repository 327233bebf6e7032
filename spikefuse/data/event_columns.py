"""Find the columns of events in arrays of several layouts, and in HDF5 files.

spikefuse/isolated.py runs this file in its process, so it does not import spikefuse.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

# Groups or datasets of an HDF5 file that hold the columns, and names of these.
PLACES = ("events", "CD/events")
NAMES = (
    ("x", "xs"),
    ("y", "ys"),
    ("p", "ps", "polarity", "on"),
    ("t", "ts", "timestamp", "timestamps"),
)


def columns(place: Any, header: Sequence[str] | None = None) -> Iterator[np.ndarray]:
    """Yield x, y, p and t, each of which may have one of several names.

    Args:
        place: an array with fields, or arrays by name.
        header: all names of columns, which may repeat; by default the names of `place`.

    Raises:
        ValueError: it has no such columns, or several for one of them.
    """
    kind = getattr(place, "dtype", None)
    if kind is not None and not kind.names:
        raise ValueError(f"an array {kind} {list(place.shape)} without fields: expected x, y, p, t")
    known = header or ([*place] if kind is None else kind.names)
    for names in NAMES:
        found = [name for name in known if name in names]
        if not found:
            raise ValueError(f"it has no {names[0]} among {', '.join(known) or 'no names'}")
        if len(found) > 1:
            raise ValueError(
                f"it has {' and '.join(found)}, which all mean {names[0]}: remove or rename all "
                "but one"
            )
        name = found[0]
        column = np.asarray(place[name])
        if column.ndim != 1 or column.dtype.kind not in "iubf":
            raise ValueError(f"{name} is {column.dtype} {list(column.shape)}, expected numbers [E]")
        yield column


def read(file: Any) -> Iterator[np.ndarray]:
    """Yield the columns of an open `h5py.File`."""
    return columns(next((file[name] for name in PLACES if name in file), file))
