"""N-MNIST: 60000 + 10000 recordings of MNIST digits by a moving camera of 34 x 34 pixels.

Orchard, Jayawant, Cohen, Thakor, "Converting Static Image Datasets to Spiking Neuromorphic
Datasets Using Saccades", Frontiers in Neuroscience 9:437, 2015.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from spikefuse.data.errors import DataError
from spikefuse.data.events import Events, Recordings, make_events
from spikefuse.data.files import damaged, find_folder

PAGE = "https://www.garrickorchard.com/datasets/n-mnist"
SIZE = (2, 34, 34)
NUM_CLASSES = 10
EVENT_BYTES = 5
FIELDS = np.dtype([("x", np.int64), ("y", np.int64), ("t", np.int64), ("p", np.int64)])


def find_nmnist(directory: Path) -> tuple[Recordings, Recordings]:
    """Training and test recordings from the folders Train and Test with their ten subfolders.

    Raises:
        DataError: a folder is missing or holds no .bin file.
    """
    folder = find_folder("nmnist", ("Train", "Test"), directory, PAGE)
    return _part(folder / "Train"), _part(folder / "Test")


def _part(folder: Path) -> Recordings:
    files: list[Path] = []
    labels: list[int] = []
    for label in range(NUM_CLASSES):
        found = sorted((folder / str(label)).glob("*.bin"))
        if not found:
            raise DataError(
                f"nmnist: no .bin file in {folder / str(label)}: fetch {folder.name}.zip from "
                f"{PAGE} and unpack it to {folder}"
            )
        files += found
        labels += [label] * len(found)
    return Recordings(SIZE, np.array(labels), tuple(files), partial(_read, files))


def _read(files: list[Path]) -> Iterator[Events]:
    for path in files:
        yield read_nmnist(path)


def read_nmnist(path: Path) -> Events:
    """One .bin file of N-MNIST, read by tonic.

    Raises:
        DataError: the file is missing, or no such file; tonic is not installed.
    """
    try:
        from tonic.io import read_mnist_file
    except ImportError as error:
        raise DataError(
            'N-MNIST is read by tonic, which is not installed: pip install "spikefuse[events]"'
        ) from error
    try:
        size = path.stat().st_size
        if not size or size % EVENT_BYTES:  # tonic would read what is there, or fail later
            raise damaged(path, f"{size} bytes are no whole number of events of 5 bytes")
        events = read_mnist_file(path, FIELDS)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    return make_events(events["x"], events["y"], events["p"], events["t"], SIZE, path)
