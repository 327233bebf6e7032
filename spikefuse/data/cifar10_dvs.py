"""CIFAR10-DVS: 10000 images of CIFAR-10 moving on a screen, seen by a camera of 128 x 128 pixels.

Li, Liu, Ji, Li, Shi, "CIFAR10-DVS: An Event-Stream Dataset for Object Classification", Frontiers
in Neuroscience 11:309, 2017.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from spikefuse.data.aedat import read_aedat2
from spikefuse.data.cifar import CLASSES
from spikefuse.data.files import DataError, class_files, find_folder
from spikefuse.data.recordings import TIME_LIMIT, Recording, RecordingSet, make_recording

PAGE = "https://figshare.com/articles/dataset/CIFAR10-DVS_New/4724671"
SIZE = (2, 128, 128)
NUM_TEST = 100  # the first hundred recordings of every class


def find_cifar10_dvs(directory: Path) -> tuple[RecordingSet, RecordingSet]:
    """Find training and test recordings in one folder of .aedat files per class.

    The dataset has no test set. As in most of the literature, recordings 0 to 99 of each class are
    held out and 100 to 999 are used for training (Duan et al., "Temporal Effective Batch
    Normalization in Spiking Neural Networks", NeurIPS 2022).

    Raises:
        DataError: a folder is missing, or has no .aedat file for training or for testing.
    """
    folder = find_folder("cifar10_dvs", CLASSES, directory, PAGE)
    how = f"get the zip file of the class from {PAGE} and unpack it there"
    files = class_files(folder, CLASSES, {".aedat"}, how)
    numbers = np.array([_number(path) for path in files.paths])
    order = np.lexsort((numbers, files.labels))
    train, test = (
        RecordingSet.of_files(SIZE, files.rows(chosen), read_cifar10_dvs)
        for chosen in (order[numbers[order] >= NUM_TEST], order[numbers[order] < NUM_TEST])
    )
    for label, name in enumerate(CLASSES):
        counts = [np.count_nonzero(part.labels == label) for part in (train, test)]
        if not all(counts):
            raise DataError(
                f"cifar10_dvs: {folder / name} has {counts[0]} recordings from number {NUM_TEST} "
                f"and {counts[1]} below: {how}"
            )
    return train, test


def _number(path: Path) -> int:
    """Return 17 for cifar10_airplane_17.aedat; files without a number are for training."""
    digits = re.search(r"(\d+)$", path.stem)
    return int(digits[1]) if digits else NUM_TEST


def read_cifar10_dvs(path: Path) -> Recording:
    """Read one recording, upright, with time from its earliest event.

    The camera lay on its side: its columns are rows here, and its rows columns, as in the
    conversion `dat2mat` that the authors refer to.
    """
    row, column, p, t = read_aedat2(path)
    return make_recording((column, row, p, t - t.min(initial=TIME_LIMIT)), SIZE, path)
