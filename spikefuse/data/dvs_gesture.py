"""DVS128 Gesture: 11 gestures of 29 persons, seen by a camera of 128 x 128 pixels.

Amir et al., "A Low Power, Fully Event-Based Gesture Recognition System", CVPR 2017.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from spikefuse.data.aedat import read_aedat3
from spikefuse.data.errors import DataError
from spikefuse.data.events import Events, Recordings, make_events
from spikefuse.data.files import damaged, find_folder

PAGE = "https://research.ibm.com/interactive/dvsgesture/"
SIZE = (2, 128, 128)
CLASSES = (
    *("hand clapping", "right hand wave", "left hand wave"),
    *("right arm clockwise", "right arm counter-clockwise"),
    *("left arm clockwise", "left arm counter-clockwise"),
    *("arm roll", "air drums", "air guitar", "other"),
)
LISTS = ("trials_to_train.txt", "trials_to_test.txt")


def find_dvs_gesture(directory: Path) -> tuple[Recordings, Recordings]:
    """Training and test gestures, as the two lists of trials divide them.

    A gesture is the events of a trial from its start to before its end, by the trial's CSV file.
    That makes 1176 + 288 gestures of the published files.

    Raises:
        DataError: a file is missing or damaged.
    """
    try:
        folder = find_folder("dvs_gesture", LISTS, directory, PAGE)
    except DataError:  # DvsGesture is the folder in the published archive
        folder = find_folder("dvs_gesture/DvsGesture", LISTS, directory, PAGE)
    return _part(folder, LISTS[0]), _part(folder, LISTS[1])


def _part(folder: Path, trials: str) -> Recordings:
    names = (folder / trials).read_text().split()
    if not names:
        raise damaged(folder / trials, "it names no trial")
    paths = [folder / name for name in names]
    tables = [path.with_name(f"{path.stem}_labels.csv") for path in paths]
    for path in (*paths, *tables):
        if not path.is_file():
            raise DataError(
                f"dvs_gesture: {path} is missing, which {trials} asks for: fetch the data set from "
                f"{PAGE} and unpack it to {folder}"
            )
    gestures = [_gestures(table) for table in tables]
    labels = np.concatenate([rows[:, 0] for rows in gestures])
    read = partial(_read, paths, gestures)
    return Recordings(SIZE, labels, (*paths, *tables), read)


def _gestures(path: Path) -> np.ndarray:
    """int64 rows of (label from 0, first microsecond, microsecond after the last)."""
    try:
        lines = path.read_text().split()[1:]  # the first names the columns
        rows = np.array([line.split(",") for line in lines], np.int64)
    except ValueError as error:
        raise damaged(path, f"no table of numbers: {error}") from error
    if rows.shape[1:] != (3,) or not len(rows) or not np.isin(rows[:, 0], range(1, 12)).all():
        raise damaged(path, "expected rows of class 1 to 11, start and end")
    return rows - (1, 0, 0)


def _read(paths: list[Path], gestures: list[np.ndarray]) -> Iterator[Events]:
    for path, rows in zip(paths, gestures, strict=True):
        x, y, p, t = read_aedat3(path)
        for _, start, end in rows:
            # Not by bisection: the clock of a trial may step back.
            k = (t >= start) & (t < end)
            yield make_events(x[k], y[k], p[k], t[k] - start, SIZE, path)
