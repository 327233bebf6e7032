"""Read an HDF5 file of the Heidelberg datasets, in the process of spikefuse/isolated.py."""

from collections.abc import Iterator

import h5py
import numpy as np


def read(file: h5py.File) -> Iterator[np.ndarray]:
    """Yield the labels, then times and units of each recording, after a check of the layout.

    Raises:
        ValueError: the file holds other datasets, or they are damaged.
    """
    labels, *columns = (file[name] for name in ("labels", "spikes/times", "spikes/units"))
    shapes = [part.shape for part in (labels, *columns)]
    # A recording takes more than a byte, so a larger count is damaged.
    fits = len(shapes[0]) == 1 and 0 < shapes[0][0] <= file.id.get_filesize()
    if not fits or shapes.count(shapes[0]) < 3:
        counts = ("x".join(map(str, shape)) for shape in shapes)
        raise ValueError("{} labels, {} times, {} units".format(*counts))
    # Arrays of any length, of numbers: an element of other types may have any size.
    kinds = [(part.dtype.metadata or {}).get("vlen", object) for part in columns]
    if wrong := [k for k in map(np.dtype, [labels.dtype, *kinds]) if k.kind not in "iuf"]:
        raise ValueError(f"elements of type {wrong[0]}, expected numbers")
    yield labels[()]
    for i in range(len(labels)):
        try:
            yield from (part[i] for part in columns)
        except Exception as error:  # h5py may raise anything
            raise ValueError(f"recording {i}: {error}") from error
