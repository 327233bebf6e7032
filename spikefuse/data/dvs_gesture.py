"""DVS128 Gesture: 11 gestures of 29 persons, seen by a camera of 128 x 128 pixels.

Amir et al., "A Low Power, Fully Event-Based Gesture Recognition System", CVPR 2017.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from spikefuse.data.aedat import read_aedat3
from spikefuse.data.files import DataError, damaged, find_folder
from spikefuse.data.recordings import TIME_LIMIT, Recording, RecordingSet, make_recording

PAGE = "https://research.ibm.com/interactive/dvsgesture/"
SIZE = (2, 128, 128)
CLASSES = (
    *("hand clapping", "right hand wave", "left hand wave"),
    *("right arm clockwise", "right arm counter-clockwise"),
    *("left arm clockwise", "left arm counter-clockwise"),
    *("arm roll", "air drums", "air guitar", "other"),
)
LISTS = ("trials_to_train.txt", "trials_to_test.txt")


def find_dvs_gesture(directory: Path) -> tuple[RecordingSet, RecordingSet]:
    """Find training and test gestures according to the two lists of trials.

    A gesture is the events of a trial from its start until before its end, as given by the CSV file
    of the trial: 1176 + 288 gestures in the published files.
    """
    folder = find_folder("dvs_gesture", LISTS, directory, PAGE, "DvsGesture")
    return _recordings(folder, LISTS[0]), _recordings(folder, LISTS[1])


def _recordings(folder: Path, trials: str) -> RecordingSet:
    try:
        names = (folder / trials).read_text().split()
        paths = [folder / name for name in names]
        tables = [path.with_name(f"{path.stem}_labels.csv") for path in paths]
    except ValueError as error:
        raise damaged(folder / trials, f"not a list of files: {error}") from error
    if not names:
        raise damaged(folder / trials, "it lists no trial")
    for path in (*paths, *tables):
        if not path.is_file():
            raise DataError(
                f"dvs_gesture: {path} is missing, which {trials} needs: get the dataset from "
                f"{PAGE} and unpack it to {folder}"
            )
    gestures = [_gestures(table) for table in tables]
    labels = np.concatenate([rows[:, 0] for rows in gestures])
    return RecordingSet(SIZE, labels, (*paths, *tables), partial(_read, paths, gestures))


def read_gestures(path: Path) -> Iterator[Recording]:
    """Read the gestures that the table beside a file lists; without one, all of it is one."""
    table = path.with_name(f"{path.stem}_labels.csv")
    if table.is_file():
        yield from _read([path], [_gestures(table)])
    else:
        x, y, p, t = read_aedat3(path)
        yield make_recording((x, y, p, t - t.min(initial=TIME_LIMIT)), SIZE, path)


def _gestures(path: Path) -> np.ndarray:
    """Return int64 rows of (label from 0, first microsecond, microsecond after the last)."""
    try:
        lines = path.read_text().split()[1:]  # without the column names
        rows = np.array([line.split(",") for line in lines], np.int64)
    except (ValueError, OverflowError) as error:
        raise damaged(path, f"not a table of numbers: {error}") from error
    if rows.shape[1:] != (3,) or not len(rows):
        raise damaged(path, "expected rows of class, start and end")
    label, start, end = rows.T
    wrong = (label < 1) | (label > len(CLASSES)) | (start < 0) | (start >= end)
    if wrong.any():
        found = ",".join(map(str, rows[wrong][0]))
        raise damaged(path, f"row {found}: expected a class from 1 to 11 and 0 <= start < end")
    return rows - (1, 0, 0)


def _read(paths: list[Path], gestures: list[np.ndarray]) -> Iterator[Recording]:
    for path, rows in zip(paths, gestures, strict=True):
        whole = make_recording(read_aedat3(path), SIZE, path)
        for label, start, end in rows:
            first, last = np.searchsorted(whole.t, (start, end))
            if first == last:
                gesture = f"the gesture {CLASSES[label]!r} from {start} to {end} microseconds"
                raise damaged(path, f"it has no event of {gesture}")
            k = slice(first, last)
            yield Recording(whole.x[k], whole.y[k], whole.p[k], whole.t[k] - start, SIZE)
