"""CIFAR10-DVS: 10000 images of CIFAR-10 moving on a screen, seen by a camera of 128 x 128 pixels.

Li, Liu, Ji, Li, Shi, "CIFAR10-DVS: An Event-Stream Dataset for Object Classification", Frontiers
in Neuroscience 11:309, 2017.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from spikefuse.data.aedat import read_aedat2
from spikefuse.data.cifar import CLASSES
from spikefuse.data.errors import DataError
from spikefuse.data.events import Events, Recordings, make_events
from spikefuse.data.files import find_folder

PAGE = "https://figshare.com/articles/dataset/CIFAR10-DVS_New/4724671"
SIZE = (2, 128, 128)
NUM_TEST = 100  # of every class: the first hundred


def find_cifar10_dvs(directory: Path) -> tuple[Recordings, Recordings]:
    """Training and test recordings from one folder of .aedat files per class.

    The data set has no test set of its own. As most of the literature does, recordings 0 to 99 of
    each class are held out and 100 to 999 are trained on (Duan et al., "Temporal Effective Batch
    Normalization in Spiking Neural Networks", NeurIPS 2022).

    Raises:
        DataError: a folder is missing or holds no .aedat file of one of the parts.
    """
    folder = find_folder("cifar10_dvs", CLASSES, directory, PAGE)
    parts: tuple[list[tuple[Path, int]], ...] = ([], [])
    for label, name in enumerate(CLASSES):
        files = sorted((folder / name).glob("*.aedat"), key=_number)
        train = [(file, label) for file in files if _number(file) >= NUM_TEST]
        test = [(file, label) for file in files if _number(file) < NUM_TEST]
        if not train or not test:
            raise DataError(
                f"cifar10_dvs: {folder / name} has {len(train)} recordings from number {NUM_TEST} "
                f"and {len(test)} below: fetch {name}.zip from {PAGE} and unpack it there"
            )
        parts[0].extend(train)
        parts[1].extend(test)
    train_part, test_part = map(_part, parts)
    return train_part, test_part


def _number(path: Path) -> int:
    """17 of cifar10_airplane_17.aedat; files without a number count as training ones."""
    found = re.search(r"(\d+)$", path.stem)
    return int(found[1]) if found else NUM_TEST


def _part(pairs: list[tuple[Path, int]]) -> Recordings:
    files = [file for file, _ in pairs]
    labels = np.array([label for _, label in pairs])
    return Recordings(SIZE, labels, tuple(files), partial(_read, files))


def _read(files: list[Path]) -> Iterator[Events]:
    for path in files:
        yield read_cifar10_dvs(path)


def read_cifar10_dvs(path: Path) -> Events:
    """One recording, upright, time from its first event.

    The camera lay on its side: column 127 - Y, row 127 - X of the address, and a polarity bit of
    0 is a rise of brightness, as in the conversion `dat2mat` that the authors point to.

    Raises:
        DataError: the file is missing or damaged.
    """
    x, y, p, t = read_aedat2(path)
    return make_events(127 - y, 127 - x, 1 - p, t - t[:1], SIZE, path)
