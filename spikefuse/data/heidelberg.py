"""Spiking Heidelberg Digits and Spiking Speech Commands: speech through a cochlea of 700 units.

Cramer, Stradmann, Schemmel, Zenke, "The Heidelberg Spiking Data Sets for the Systematic
Evaluation of Spiking Neural Networks", IEEE TNNLS 33(7), 2022.

The files are HDF5, read by h5py: tonic's classes for them do the same, but want the archives of a
download beside them and open the file anew for each recording.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from spikefuse.data.errors import DataError
from spikefuse.data.events import Events, Recordings, make_events
from spikefuse.data.files import damaged, find_folder

PAGE = "https://zenkelab.org/datasets/"
SIZE = (700,)
SHD_CLASSES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"),
)
SSC_CLASSES = tuple(f"word {i}" for i in range(35))


def find_heidelberg(name: str, num_classes: int, directory: Path) -> tuple[Recordings, Recordings]:
    """Training and test recordings from `<name>_train.h5` and `<name>_test.h5`.

    Args:
        name: "shd" or "ssc".
        num_classes: labels have to be below.
        directory: holds the files, or a folder named like the data set that does.

    Raises:
        DataError: a file is missing or damaged; h5py is not installed.
    """
    marks = (f"{name}_train.h5", f"{name}_test.h5")
    folder = find_folder(name, marks, directory, PAGE)
    train, test = (_part(folder / mark, num_classes) for mark in marks)
    return train, test


def _part(path: Path, num_classes: int) -> Recordings:
    with _open(path) as file:
        try:
            labels = np.asarray(file["labels"][()]).astype(np.int64)
            lengths = len(file["spikes/times"]), len(file["spikes/units"])
        except (KeyError, OSError, ValueError, TypeError) as error:
            raise damaged(path, str(error)) from error
    if lengths != (len(labels), len(labels)) or not len(labels):
        raise damaged(path, f"{len(labels)} labels, {lengths[0]} times, {lengths[1]} units")
    if labels.min() < 0 or labels.max() >= num_classes:
        raise damaged(path, f"labels to {labels.max()}, expected below {num_classes}")
    return Recordings(SIZE, labels, (path,), partial(_read, path))


def _read(path: Path) -> Iterator[Events]:
    with _open(path) as file:
        times, units = file["spikes/times"], file["spikes/units"]
        for i in range(len(times)):
            try:
                t, x = np.asarray(times[i], np.float64), np.asarray(units[i])
            except (OSError, ValueError) as error:
                raise damaged(path, f"recording {i}: {error}") from error
            if t.shape != x.shape:
                raise damaged(path, f"recording {i}: {len(t)} times, {len(x)} units")
            zeros = np.zeros(len(x), np.uint8)
            yield make_events(x, zeros, zeros, np.rint(t * 1e6), SIZE, path)


def _open(path: Path) -> Any:
    try:
        import h5py
    except ImportError as error:
        raise DataError(
            f'{path.name} is read by h5py, which is not installed: pip install "spikefuse[events]"'
        ) from error
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise damaged(path, f"no HDF5 file: {error}") from error
