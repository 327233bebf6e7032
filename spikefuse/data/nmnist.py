"""N-MNIST: 60000 + 10000 recordings of MNIST digits by a moving camera of 34 x 34 pixels.

Orchard, Jayawant, Cohen, Thakor, "Converting Static Image Datasets to Spiking Neuromorphic
Datasets Using Saccades", Frontiers in Neuroscience 9:437, 2015.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from spikefuse.data.files import DataError, class_files, damaged, find_folder, not_installed
from spikefuse.data.recordings import Recording, RecordingSet, make_recording

PAGE = "https://www.garrickorchard.com/datasets/n-mnist"
SIZE = (2, 34, 34)
EVENT_BYTES = 5
FIELDS = np.dtype([("x", np.int64), ("y", np.int64), ("t", np.int64), ("p", np.int64)])


def find_nmnist(directory: Path) -> tuple[RecordingSet, RecordingSet]:
    """Find training and test recordings in the folders Train and Test with ten subfolders each.

    Raises:
        DataError: a folder is missing or has no .bin file.
    """
    folder = find_folder("nmnist", ("Train", "Test"), directory, PAGE)
    return _recordings(folder / "Train"), _recordings(folder / "Test")


def _recordings(folder: Path) -> RecordingSet:
    how = f"get {folder.name}.zip from {PAGE} and unpack it to {folder}"
    files, labels = class_files(folder, "0123456789", {".bin"}, how)
    return RecordingSet(SIZE, np.array(labels), files, partial(map, read_nmnist, files))


def read_saccades(path: Path, size: tuple[int, ...]) -> Recording:
    """Read one .bin file of N-MNIST or N-Caltech101, using tonic.

    Args:
        path: of the file.
        size: of the sensor, (P, H, W).

    Raises:
        DataError: the file is missing or invalid, or tonic is not installed.
    """
    try:
        from tonic.io import read_mnist_file
    except ImportError as error:
        raise not_installed(path.name, "tonic", "events") from error
    try:
        num_bytes = path.stat().st_size
        if not num_bytes or num_bytes % EVENT_BYTES:  # tonic would read some of it, or fail later
            raise damaged(path, f"{num_bytes} bytes are not a multiple of 5, one event")
        events = read_mnist_file(path, FIELDS)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    columns = (events["x"], events["y"], events["p"], events["t"])
    return make_recording(columns, size, path)


read_nmnist = partial(read_saccades, size=SIZE)
