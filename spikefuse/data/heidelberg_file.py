"""The program that reads a file of the Heidelberg data sets.

    python heidelberg_file.py FILE SECONDS

It is a process of its own because the HDF5 library crashes at some damaged files and never ends at
others: an alarm ends the process if one array takes longer than SECONDS. It writes float64 arrays
to standard output, each after its length as int64: the labels, then times and units of each
recording. It doesn't import spikefuse, so that it starts at once.
"""

import signal
import sys
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np

# Errors of h5py for damaged content.
READ_ERRORS = (KeyError, OSError, ValueError, TypeError, AttributeError, RuntimeError, MemoryError)


def read(path: str) -> Iterator[np.ndarray]:
    """Yield the labels, then times and units of each recording, after a check of the layout.

    Raises:
        ValueError: the file is not an HDF5 file, or holds other data sets.
    """
    try:
        opened = h5py.File(path, "r")
    except OSError as error:
        raise ValueError(f"not an HDF5 file: {error}") from error
    with opened as file:
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
            except READ_ERRORS as error:
                raise ValueError(f"recording {i}: {error}") from error


def write(array: Any) -> None:
    """Write an array after its length."""
    values = np.asarray(array, np.float64)
    sys.stdout.buffer.write(values.size.to_bytes(8, "little") + values.tobytes())


def set_alarm(seconds: int) -> None:
    """End the process after `seconds`, or never if 0, unless called again; not on Windows."""
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)


if __name__ == "__main__":
    path, limit = sys.argv[1], int(sys.argv[2])
    set_alarm(limit)
    try:
        for values in read(path):
            set_alarm(0)  # the reader of the output may take any time
            write(values)
            set_alarm(limit)
    except READ_ERRORS as error:
        sys.exit(str(error))
