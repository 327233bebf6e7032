"""Spiking Heidelberg Digits and Spiking Speech Commands: speech through a cochlea of 700 units.

Cramer, Stradmann, Schemmel, Zenke, "The Heidelberg Spiking Data Sets for the Systematic
Evaluation of Spiking Neural Networks", IEEE TNNLS 33(7), 2022.

The HDF5 files are read with h5py. tonic's classes for them require the downloaded archives and
reopen the file for each recording.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from spikefuse.data.files import damaged, find_folder, not_installed
from spikefuse.data.recordings import Recording, RecordingSet, make_recording

PAGE = "https://zenkelab.org/datasets/"
SIZE = (700,)
# Errors of h5py for damaged content.
READ_ERRORS = (KeyError, OSError, ValueError, TypeError, AttributeError, RuntimeError, MemoryError)
SHD_CLASSES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"),
)
SSC_CLASSES = tuple(f"word {i}" for i in range(35))


def find_heidelberg(
    name: str, num_classes: int, directory: Path
) -> tuple[RecordingSet, RecordingSet]:
    """Find training and test recordings in `<name>_train.h5` and `<name>_test.h5`.

    Args:
        name: "shd" or "ssc".
        num_classes: labels must be less.
        directory: folder of the files, or of a folder `name` with them.

    Raises:
        DataError: a file is missing or damaged, or h5py is not installed.
    """
    names = (f"{name}_train.h5", f"{name}_test.h5")
    folder = find_folder(name, names, directory, PAGE)
    train, test = (recordings_in(folder / part, num_classes) for part in names)
    return train, test


def recordings_in(path: Path, num_classes: int) -> RecordingSet:
    """Check the labels and the layout of a file; `read` of the result checks each recording.

    Raises:
        DataError: the file is missing or damaged, or h5py is not installed.
    """
    with _open(path) as file:
        try:
            shapes = [file[name].shape for name in ("labels", "spikes/times", "spikes/units")]
            # A recording takes more than a byte, so a larger count is damaged.
            fits = len(shapes[0]) == 1 and 0 < shapes[0][0] <= path.stat().st_size
            if not fits or shapes.count(shapes[0]) < 3:
                counts = ("x".join(map(str, shape)) for shape in shapes)
                raise ValueError("{} labels, {} times, {} units".format(*counts))
            _check_types(file)
            labels = np.asarray(file["labels"][()])
        except READ_ERRORS as error:
            raise damaged(path, str(error)) from error
    if len(wrong := labels[~np.isin(labels, np.arange(num_classes))]):
        raise damaged(path, f"a label {wrong[0]}, expected one from 0 to {num_classes - 1}")
    return RecordingSet(SIZE, labels.astype(np.int64), (path,), partial(_read, path))


def _check_types(file: Any) -> None:
    """Check that the file holds numbers: an element of other types may have any size."""
    types = [file["labels"].dtype]
    for name in ("spikes/times", "spikes/units"):  # arrays of any length
        types.append((file[name].dtype.metadata or {}).get("vlen", file[name].dtype))
    if wrong := [kind for kind in map(np.dtype, types) if kind.kind not in "iuf"]:
        raise ValueError(f"elements of type {wrong[0]}, expected numbers")


def _read(path: Path) -> Iterator[Recording]:
    with _open(path) as file:
        times, units = file["spikes/times"], file["spikes/units"]
        for i in range(len(times)):
            try:
                t, x = np.asarray(times[i], np.float64), np.asarray(units[i])
            except READ_ERRORS as error:
                raise damaged(path, f"recording {i}: {error}") from error
            if t.shape != x.shape or t.ndim != 1:
                raise damaged(path, f"recording {i}: {t.size} times, {x.size} units")
            zeros = np.zeros(len(x), np.uint8)
            yield make_recording((x, zeros, zeros, np.rint(t * 1e6)), SIZE, path)


def _open(path: Path) -> Any:
    try:
        import h5py
    except ImportError as error:
        raise not_installed(path.name, "h5py", "events") from error
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise damaged(path, f"not an HDF5 file: {error}") from error


find_shd = partial(find_heidelberg, "shd", len(SHD_CLASSES))
find_ssc = partial(find_heidelberg, "ssc", len(SSC_CLASSES))
