"""Folders of a user's own recordings of event cameras."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from spikefuse import isolated
from spikefuse.data.dataset import Dataset, Reader
from spikefuse.data.event_files import ENDINGS, read_events, sensor_of
from spikefuse.data.files import DataError
from spikefuse.data.frames import Frames, Slicing
from spikefuse.data.listing import list_files
from spikefuse.data.recordings import Recording, RecordingSet
from spikefuse.data.store import load_parts

# Endings and reader of single files.
FILES: tuple[tuple[str, ...], Reader] = (
    tuple(sorted(ENDINGS)),
    lambda path, sensor, size, **_: iter([read_events(path, sensor, size)]),
)


def event_folder(
    path: str | os.PathLike[str],
    sensor: str | None = None,
    size: int | None = None,
    seed: int = 0,
    **slicing: Any,
) -> Dataset:
    """Describe the recordings in a folder, with the names of its subfolders as classes.

    Example::

        recordings = sf.data.event_folder("recordings", num_steps=16)
        training, test = sf.data.load(recordings)

    Folders, tables of labels and the split are as for `image_folder`. A file holds one recording,
    in AEDAT 2.0 (of a DVS128), 3.1 or 4 (.aedat, .aedat4), Prophesee's EVT 2, 2.1, 3 (.raw) or DAT
    (.dat), ES (.es), the format of N-MNIST (.bin), HDF5 (.h5, .hdf5), NumPy (.npy, .npz) or CSV.
    HDF5 and .npz hold arrays x, y, p and t, in HDF5 also in a group `events`; .npy and CSV have
    fields or columns of these names. Times are in microseconds, and count from the first event;
    events are sorted by time. Row 0 is the upper one, and polarity 1 an increase of brightness.

    Args:
        path: of the folder.
        sensor: columns and rows of the camera, such as "346x260"; needed where files do not tell.
        size: rows and columns of a frame: coordinates are scaled so that the shorter side fits, and
            events beyond a square at the centre are dropped. By default those of the sensor.
        seed: of the split.
        slicing: how recordings become frames, as `Slicing` takes it.

    Returns:
        The description, whose `classes` are in alphabetical order. `load` returns `Frames`, which
        are computed once and cached on disk, so that they may exceed the memory.

    Raises:
        DataError: the folder is missing, has fewer than two classes or a class without recordings,
            its parts differ in classes, an option is invalid, the size of the sensor is unknown, or
            a package is not installed. Of `load`: a file is damaged, or has more events than fit
            into memory.
    """
    chosen = Slicing(**slicing)
    classes, parts = list_files(Path(path).expanduser(), ENDINGS, seed)
    height, width = sensor_of(parts[0].paths[0], sensor) if size is None else (size, size)
    shape = (2, height, width)

    def read_all(files: Sequence[Path]) -> Iterator[Recording]:
        with isolated.one_process():
            for file in files:
                recording = read_events(file, sensor, size)
                if recording.size != shape:
                    _, rows, columns = recording.size
                    raise DataError(
                        f"{file} is of a sensor of {columns}x{rows}, and {parts[0].paths[0]} of "
                        f"one of {width}x{height}: set size to scale all to the same"
                    )
                yield recording

    def read(
        directory: Path, download: bool, sensor: str | None, size: int | None, **slicing: Any
    ) -> tuple[Frames, ...]:
        sets = [
            RecordingSet(shape, part.labels, part.paths, partial(read_all, part.paths))
            for part in parts
        ]
        return load_parts(f"events-{sensor or 'sensor'}", sets, Slicing(**slicing))

    options = {**vars(chosen), "sensor": sensor, "size": size}
    return Dataset(shape, classes, read, "events", options, FILES)
