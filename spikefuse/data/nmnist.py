"""N-MNIST: 60000 + 10000 recordings of MNIST digits by a moving camera of 34 x 34 pixels.

Orchard, Jayawant, Cohen, Thakor, "Converting Static Image Datasets to Spiking Neuromorphic
Datasets Using Saccades", Frontiers in Neuroscience 9:437, 2015.
"""

from __future__ import annotations

from pathlib import Path

from spikefuse.data.event_files import read_saccades
from spikefuse.data.files import class_files, find_folder
from spikefuse.data.recordings import Recording, RecordingSet, make_recording

PAGE = "https://www.garrickorchard.com/datasets/n-mnist"
SIZE = (2, 34, 34)


def find_nmnist(directory: Path) -> tuple[RecordingSet, RecordingSet]:
    """Find training and test recordings in the folders Train and Test with ten subfolders each.

    Raises:
        DataError: a folder is missing or has no .bin file.
    """
    folder = find_folder("nmnist", ("Train", "Test"), directory, PAGE)
    return _recordings(folder / "Train"), _recordings(folder / "Test")


def _recordings(folder: Path) -> RecordingSet:
    how = f"get {folder.name}.zip from {PAGE} and unpack it to {folder}"
    files = class_files(folder, "0123456789", {".bin"}, how)
    return RecordingSet.of_files(SIZE, files, read_nmnist)


def read_nmnist(path: Path, size: tuple[int, int, int] = SIZE) -> Recording:
    """Read one .bin file, of N-MNIST or with the `size` of another sensor.

    Raises:
        DataError: the file is missing or damaged.
    """
    return make_recording(read_saccades(path), size, path)
