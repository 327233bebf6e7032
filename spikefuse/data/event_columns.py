"""Read the columns of events in an HDF5 file, in the process of spikefuse/isolated.py."""

from collections.abc import Iterator

import h5py
import numpy as np

# Groups or data sets that hold the columns, and names of these.
PLACES = ("events", "CD/events")
NAMES = (("x", "xs"), ("y", "ys"), ("p", "ps", "polarity", "on"), ("t", "ts", "timestamps"))


def read(file: h5py.File) -> Iterator[np.ndarray]:
    """Yield x, y, p and t.

    Raises:
        ValueError: the file has no such columns.
    """
    place = next((file[name] for name in PLACES if name in file), file)
    known = place.dtype.names or () if isinstance(place, h5py.Dataset) else place
    for names in NAMES:
        name = next((name for name in names if name in known), None)
        if name is None:
            raise ValueError(f"no {names[0]} among {', '.join(known)}")
        column = place if isinstance(place, h5py.Dataset) else place[name]
        kind = column.dtype[name] if column is place else column.dtype
        if column.ndim != 1 or kind.kind not in "iubf":
            raise ValueError(f"{name} is {kind} {list(column.shape)}, expected numbers [E]")
        yield place[name] if column is place else column[()]
