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
    train, test = (_recordings(folder / part, num_classes) for part in names)
    return train, test


def _recordings(path: Path, num_classes: int) -> RecordingSet:
    with _open(path) as file:
        try:
            labels = np.asarray(file["labels"][()])
            lengths = len(file["spikes/times"]), len(file["spikes/units"])
        except (KeyError, OSError, ValueError, TypeError) as error:
            raise damaged(path, str(error)) from error
    if lengths != (len(labels), len(labels)) or not len(labels):
        raise damaged(path, f"{len(labels)} labels, {lengths[0]} times, {lengths[1]} units")
    wrong = labels[~np.isin(labels, np.arange(num_classes))]
    if labels.ndim != 1 or len(wrong):
        found = f"a label {wrong[0]}" if len(wrong) else f"labels of shape {list(labels.shape)}"
        raise damaged(path, f"{found}, expected one from 0 to {num_classes - 1} per recording")
    return RecordingSet(SIZE, labels.astype(np.int64), (path,), partial(_read, path))


def _read(path: Path) -> Iterator[Recording]:
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
