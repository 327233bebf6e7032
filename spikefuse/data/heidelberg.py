"""Spiking Heidelberg Digits and Spiking Speech Commands: speech through a cochlea of 700 units.

Cramer, Stradmann, Schemmel, Zenke, "The Heidelberg Spiking Data Sets for the Systematic
Evaluation of Spiking Neural Networks", IEEE TNNLS 33(7), 2022.

The HDF5 files are read with h5py, in a process of its own (spikefuse/isolated.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from spikefuse.data.files import damaged, find_folder, read_isolated
from spikefuse.data.recordings import Recording, RecordingSet, make_recording

PAGE = "https://zenkelab.org/datasets/"
SIZE = (700,)
SHD_CLASSES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"),
)
SSC_CLASSES = tuple(f"word {i}" for i in range(35))


def find_heidelberg(
    name: str, parts: Sequence[str], num_classes: int, directory: Path
) -> tuple[RecordingSet, ...]:
    """Find the recordings in `<name>_<part>.h5`.

    Args:
        name: "shd" or "ssc".
        parts: of the published files: SSC has a validation set, "valid".
        num_classes: labels must be less.
        directory: folder of the files, or of a folder `name` with them.
    """
    names = tuple(f"{name}_{part}.h5" for part in parts)
    folder = find_folder(name, names, directory, PAGE)
    return tuple(recordings_in(folder / file, num_classes) for file in names)


def recordings_in(path: Path, num_classes: int) -> RecordingSet:
    """Check the labels and the layout of a file; `read` of the result checks each recording."""
    with contextlib.closing(read_isolated(path, "heidelberg_file.py", "h5py")) as arrays:
        labels = next(arrays)
    if len(wrong := labels[~np.isin(labels, np.arange(num_classes))]):
        raise damaged(path, f"a label {wrong[0]:g}, expected one from 0 to {num_classes - 1}")
    return RecordingSet(SIZE, labels.astype(np.int64), (path,), partial(_read, path))


def _read(path: Path) -> Iterator[Recording]:
    arrays = read_isolated(path, "heidelberg_file.py", "h5py")
    for i in range(len(next(arrays))):
        t, x = (next(arrays).astype(np.float64) for _ in range(2))
        if t.size != x.size:
            raise damaged(path, f"recording {i}: {t.size} times, {x.size} units")
        zeros = np.zeros(len(x), np.uint8)
        yield make_recording((x, zeros, zeros, np.rint(t * 1e6)), SIZE, path)


find_shd = partial(find_heidelberg, "shd", ("train", "test"), len(SHD_CLASSES))
find_ssc = partial(find_heidelberg, "ssc", ("train", "valid", "test"), len(SSC_CLASSES))
