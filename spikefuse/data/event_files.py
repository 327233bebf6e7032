"""Files of recordings of event cameras."""

from __future__ import annotations

import contextlib
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spikefuse.data.aedat import read_aedat2, read_aedat3
from spikefuse.data.event_columns import columns
from spikefuse.data.evt import HEADER_BYTES, is_evt, read_evt
from spikefuse.data.files import (
    DataError,
    check_regular,
    damaged,
    free_memory,
    max_content,
    opened,
    read_bytes,
    read_isolated,
)
from spikefuse.data.recordings import Columns, Recording, check_memory, make_recording

# Columns and rows of a sensor.
Sensor = tuple[int, int]
# Endings of files that faery decodes, and the layout of its events.
FAERY = (".aedat4", ".raw", ".dat", ".es")
EVENT = np.dtype([("t", "<u8"), ("x", "<u2"), ("y", "<u2"), ("p", "?")])
DVS128 = (128, 128)
# Of what a DAT file may hold in place of events of type 12, by its type.
DAT_OTHERS = {0: "events of the older type Event2D", 14: "triggers"}


def read_events(path: Path, sensor: str | None = None, size: int | None = None) -> Recording:
    """Read the recording in a file, with time from its first event.

    Args:
        path: in one of the formats of `event_folder`.
        sensor, size: as for `event_folder`.

    Raises:
        DataError: the file is missing or damaged, an event lies outside the sensor, the size of the
            sensor is unknown, a package is not installed, or the events need more memory than is
            free.
    """
    (x, y, p, t), found = _decode(path, _parse(sensor))
    check_memory(path, len(t))
    width, height = _known(path, found)
    if p.dtype.kind in "if" and (p == -1).any():  # a decrease is -1 or 0
        if (p == 0).any():
            raise _unsuitable(path, "p has both -1 and 0: expected 0 and 1, or -1 and 1")
        p = np.where(p == -1, 0, p)
    if not len(t):
        raise _unsuitable(path, "it has no event")
    if t.dtype.kind in "iu" and t.dtype.itemsize == 4:
        _check_clock(path, t)
    if t.dtype.kind in "ib":  # whose differences may not fit into the same type
        t = t.astype(np.int64)
    if sensor is not None and (x.max() >= width or y.max() >= height):
        raise DataError(
            f"{path} has an event at column {x.max():g} or row {y.max():g}, outside of the sensor "
            f"{sensor}: give the size of the camera"
        )
    written_by_camera = path.suffix.lower() in (".aedat", ".bin", *FAERY)
    error = damaged if written_by_camera else _unsuitable
    whole = make_recording((x, y, p, t - t.min()), (2, height, width), path, error)
    return whole if size is None else _scaled(whole, size)


def _check_clock(path: Path, t: np.ndarray) -> None:
    """Refuse times of 32 bits that wrap around, which sorting would put before the others."""
    wraps = np.flatnonzero(np.diff(t.astype(np.int64)) < -(1 << 31))
    if len(wraps):
        at = wraps[0] + 1
        raise _unsuitable(
            path,
            f"event {at} has t = {t[at]} after {t[at - 1]}, where a clock of 32 bits wraps around; "
            "write t as int64, with 2**32 more from there on",
        )


def sensor_of(path: Path, sensor: str | None = None) -> tuple[int, int]:
    """Return the rows and columns of the sensor of a file."""
    found = _parse(sensor)
    if found is None or path.suffix.lower() == ".aedat":  # version 2.0 has one sensor only
        found = _decode(path, found)[1]
    width, height = _known(path, found)
    return height, width


def _parse(sensor: str | None) -> Sensor | None:
    if sensor is None:
        return None
    match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", str(sensor))
    if match is None:
        raise DataError(
            f"sensor is {sensor!r}: expected columns and rows, such as the string '346x260'"
        )
    return int(match[1]), int(match[2])


def _known(path: Path, sensor: Sensor | None) -> Sensor:
    if sensor is None:
        raise DataError(
            f"sensor is not given, and {path} does not tell it: give columns and rows, such as "
            "346x260"
        )
    return sensor


def _scaled(recording: Recording, size: int) -> Recording:
    """Scale the shorter side of the sensor to `size`, and crop a square at the centre."""
    _, height, width = recording.size
    side = min(height, width)
    x, y = (
        values.astype(np.int32) * size // side - (extent * size // side - size) // 2
        for values, extent in ((recording.x, width), (recording.y, height))
    )
    inside = (x >= 0) & (x < size) & (y >= 0) & (y < size)
    p, t = recording.p[inside], recording.t[inside]
    return Recording(x[inside], y[inside], p, t, (2, size, size))


def _decode(path: Path, sensor: Sensor | None) -> tuple[Columns, Sensor | None]:
    """Return the events of a file, and the size of the sensor if it is known."""
    check_regular(path)
    if path.stat().st_size == 0:
        raise _unsuitable(path, "it is empty")
    check_memory(path)
    ending = path.suffix.lower()
    if ending in (".aedat", ".aedat4"):
        with opened(path) as file:
            version = file.read(12)[9:]
        if version != b"4.0":
            return (read_aedat2(path), DVS128) if version == b"2.0" else (read_aedat3(path), sensor)
        ending = ".aedat4"
    if ending == ".raw" and is_evt(path):
        columns, found = read_evt(path)
        return columns, sensor or found
    if ending == ".dat":
        _check_dat(path)
    if ending in FAERY:
        columns, found = _decode_by_faery(path)
        return columns, sensor or found
    return OTHERS[ending](path), sensor


def _check_dat(path: Path) -> None:
    with opened(path) as file:
        content = file.read(HEADER_BYTES)
    kind = re.sub(rb"\A(%.*\n)*", b"", content)[:1]
    if kind and kind[0] in DAT_OTHERS:
        raise DataError(
            f"{path} holds {DAT_OTHERS[kind[0]]}: expected events of changes in brightness "
            "(EventCD); export these from the recording by the camera's software, or remove it"
        )


def _decode_by_faery(path: Path) -> tuple[Columns, Sensor | None]:
    packets, num_events, free = [np.zeros(0, EVENT)], 0, free_memory()
    with contextlib.closing(read_isolated(path, "event_packets.py", "faery")) as arrays:
        sensor = tuple(next(arrays).tolist())
        for array in arrays:
            packets.append(array.view(EVENT))
            num_events += len(packets[-1])
            check_memory(path, num_events, free)
    x, y, p, t = (np.concatenate([packet[name] for packet in packets]) for name in "xypt")
    return (x, y, p, t), sensor or None


def read_saccades(path: Path) -> Columns:
    """Read a .bin file of N-MNIST or N-Caltech101: five bytes per event.

    They are x, y, and polarity with 23 bits of time, big-endian. A row of 240 is no event, but says
    that the times of those behind it are 2**13 later.
    """
    content = read_bytes(path)
    if not content or len(content) % 5:
        raise damaged(path, f"{len(content)} bytes are not a multiple of 5, one event")
    check_memory(path, len(content) // 5)
    x, y, high, middle, low = np.frombuffer(content, np.uint8).reshape(-1, 5).T.astype(np.int64)
    is_event = y != 240
    t = ((high & 127) << 16 | middle << 8 | low) + (np.cumsum(~is_event) << 13)
    return x[is_event], y[is_event], high[is_event] >> 7, t[is_event]


def _checked(path: Path, place: Any) -> Columns:
    """Return x, y, p and t of arrays, which must have one length."""
    try:
        x, y, p, t = columns(place)
    except ValueError as error:
        raise _unsuitable(path, str(error)) from error
    return _of_one_length(path, (x, y, p, t))


def _of_one_length(path: Path, found: Iterable[np.ndarray]) -> Columns:
    x, y, p, t = found
    if not len(x) == len(y) == len(p) == len(t):
        lengths = ", ".join(str(len(column)) for column in (x, y, p, t))
        raise _unsuitable(path, f"x, y, p and t have {lengths} values: expected one length")
    return x, y, p, t


def _read_numpy(path: Path) -> Columns:
    try:
        if path.suffix.lower() == ".npy":
            return _checked(path, np.load(path, mmap_mode="r", allow_pickle=False))
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > max_content(path):
                raise ValueError("its content is too large")
        with np.load(path, allow_pickle=False) as arrays:
            return _checked(path, arrays.get("events", arrays))
    except DataError:
        raise
    except Exception as error:  # a damaged header may raise anything
        raise damaged(path, f"not arrays of events: {error}") from error


def _read_hdf5(path: Path) -> Columns:
    return _of_one_length(path, read_isolated(path, "event_columns.py", "h5py", _unsuitable))


def _unsuitable(path: Path, what: str) -> DataError:
    """Return the error for a file that a user has written, of which there is no intact copy."""
    return DataError(f"{path} cannot be read ({what}): correct it, or remove it")


def _read_csv(path: Path) -> Columns:
    try:
        with opened(path) as file:
            header = file.readline(1 << 16).decode("utf-8-sig", "replace")
            names = [n.strip().lower().partition("@")[0] for n in header.split(",")]
            with warnings.catch_warnings(action="ignore"):  # of no data, reported below
                table = np.loadtxt(file, delimiter=",", ndmin=2)
        if not len(table):  # has one column then
            table = table.reshape(0, len(names))
        if table.shape[1] != len(names):
            found = f"{table.shape[1]} columns, of which the first line names {len(names)}"
            raise ValueError(found)
        return _of_one_length(path, columns(dict(zip(names, table.T, strict=True)), names))
    except DataError:
        raise
    except ValueError as error:
        wanted = "expected columns x, y, p and t, named in the first line, with commas between"
        raise _unsuitable(path, f"{error}; {wanted}") from error


OTHERS: Mapping[str, Callable[[Path], Columns]] = {
    ".bin": read_saccades,
    ".npy": _read_numpy,
    ".npz": _read_numpy,
    ".csv": _read_csv,
    ".h5": _read_hdf5,
    ".hdf5": _read_hdf5,
}
ENDINGS = {".aedat", *FAERY, *OTHERS}
