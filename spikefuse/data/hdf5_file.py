"""The program that reads the arrays of an HDF5 file.

    python hdf5_file.py KIND FILE SECONDS

It is a process of its own because the HDF5 library crashes at some damaged files and never ends at
others: an alarm ends the process if one array takes longer than SECONDS. It writes float64 arrays
to standard output, each after its length as int64. It doesn't import spikefuse, so that it starts
at once. KIND is "speech" for a file of the Heidelberg data sets, or "events".
"""

import signal
import sys
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np

# Errors of h5py for damaged content.
READ_ERRORS = (KeyError, OSError, ValueError, TypeError, AttributeError, RuntimeError, MemoryError)


# Groups or data sets that hold the columns of events, and names of these.
PLACES = ("events", "CD/events")
NAMES = (("x", "xs"), ("y", "ys"), ("p", "ps", "polarity", "on"), ("t", "ts", "timestamps"))
MAX_BYTES = 1 << 30  # of a column in a smaller file, which may be compressed


def read_events(path: str) -> Iterator[np.ndarray]:
    """Yield x, y, p and t.

    Raises:
        ValueError: the file is not an HDF5 file, or has no such columns.
    """
    with opened(path) as file:
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
            if 8 * len(column) > max(MAX_BYTES, 8 * file.id.get_filesize()):
                raise ValueError(f"it claims {len(column)} events")
            yield place[name] if column is place else column[()]


def opened(path: str) -> Any:
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise ValueError(f"not an HDF5 file: {error}") from error


def read_speech(path: str) -> Iterator[np.ndarray]:
    """Yield the labels, then times and units of each recording, after a check of the layout.

    Raises:
        ValueError: the file is not an HDF5 file, or holds other data sets.
    """
    with opened(path) as file:
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
    kind, path, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
    read = read_speech if kind == "speech" else read_events
    set_alarm(limit)
    try:
        for values in read(path):
            set_alarm(0)  # the reader of the output may take any time
            write(values)
            set_alarm(limit)
    except READ_ERRORS as error:
        sys.exit(str(error))
