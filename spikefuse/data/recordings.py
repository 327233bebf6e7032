"""Recordings of event cameras and artificial cochleas.

Shape legend: E events, P polarities, H rows, W columns or units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from spikefuse.data.files import DataError, Files, damaged, free_memory
from spikefuse.data.sound import Sound

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

# Microseconds, about 12 days: longer than any recording.
TIME_LIMIT = 2**40

# Of memory, that computing frames takes for each event.
BYTES_PER_EVENT = 64

# Coordinates x, y, polarity p and time t of events, each `[E]`.
Columns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Recording:
    """The events of one recording, in temporal order, as arrays or lists.

    Example::

        recording = sf.data.Recording([3, 5], [0, 7], [1, 0], [10, 250], size=(2, 34, 34))
        first = recording.x[0], recording.y[0]

    Args:
        x: column, or unit of an audio recording, `[E]`.
        y: row `[E]`; 0 for audio.
        p: polarity `[E]`, 1 where brightness increased; 0 for audio.
        t: int64 `[E]`, microseconds since the start of the recording, non-decreasing.
        size: of the sensor: (P, H, W), or (W,) for audio.

    Raises:
        DataError: the arrays differ in length or are not of whole numbers, an event lies outside
            the sensor, its time is not from 0 to 2**40 - 1 or less than that of the one before, or
            `size` is not of one or three positive integers.
    """

    x: np.ndarray
    y: np.ndarray
    p: np.ndarray
    t: np.ndarray
    size: tuple[int, ...]

    if TYPE_CHECKING:  # lists become arrays

        def __init__(
            self, x: ArrayLike, y: ArrayLike, p: ArrayLike, t: ArrayLike, size: tuple[int, ...]
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in "xypt":
            try:
                values = np.asarray(getattr(self, name))
            except ValueError as error:  # nested lists of different lengths
                raise DataError(f"{name} is not a list of whole numbers: {error}") from error
            empty = np.zeros(0, np.int64)  # an empty list is an array of floats
            object.__setattr__(self, name, empty if values.shape == (0,) else values)
        sides = tuple(self.size) if np.ndim(self.size) == 1 else ()
        is_whole = all(isinstance(n, int | np.integer) and n > 0 for n in sides)
        if len(sides) not in (1, 3) or not is_whole:
            raise DataError(f"size is {self.size!r}: expected (P, H, W), or (W,) for audio")
        columns = self.x, self.y, self.p, self.t
        if any(v.shape != (self.t.size,) or v.dtype.kind not in "iub" for v in columns):
            found = ", ".join(f"{v.dtype} {list(v.shape)}" for v in columns)
            raise DataError(f"x, y, p, t are {found}: expected whole numbers [E] for E events")
        for problem in _problems(columns, self.size):
            raise DataError(problem)
        if steps_back(self.t):
            at = int(np.flatnonzero(self.t[1:] < self.t[:-1])[0]) + 1
            raise DataError(
                f"event {at} has t = {self.t[at]} after {self.t[at - 1]}: sort the events by time"
            )

    def __len__(self) -> int:
        return len(self.t)

    @property
    def sites(self) -> np.ndarray:
        """int64 `[E]`: index of each event in the flattened sensor, `(p H + y) W + x`."""
        if len(self.size) == 1:
            return self.x.astype(np.int64)
        _, height, width = self.size
        return (self.p.astype(np.int64) * height + self.y) * width + self.x


def check_memory(path: Path, num_events: int = 0, free: int | None = None) -> None:
    """Refuse a recording that does not fit into memory.

    Args:
        path: of the recording.
        num_events: that have been found in it.
        free: bytes of memory that are free; None to ask the system.

    Raises:
        DataError: the file, or computing frames of so many events, takes more.
    """
    free = free_memory() if free is None else free
    needed = max(num_events * BYTES_PER_EVENT, path.stat().st_size)
    if needed > free:
        raise DataError(
            f"{path} needs at least {needed >> 20:,} MiB of memory, and {free >> 20:,} MiB are "
            "free: cut it into shorter recordings"
        )


def _problems(columns: Columns, size: tuple[int, ...]) -> Iterator[str]:
    """Yield what is wrong with the values of x, y, p and t."""
    polarities, height, width = size if len(size) == 3 else (1, 1, size[0])
    limits = (width, height, polarities, TIME_LIMIT)
    for name, values, limit in zip("xypt", columns, limits, strict=True):
        whole = values.dtype.kind in "iub"
        if whole and len(values) and values.min() >= 0 and values.max() < limit:
            continue
        wrong = ~((values >= 0) & (values < limit))  # includes NaN
        if values.dtype.kind == "f":
            wrong |= values != np.rint(values)
        if wrong.any():
            found = f"an event has {name} = {values[wrong][0]:.10g}"
            unit = " of microseconds" if name == "t" else ""
            yield f"{found}, expected a whole number{unit} from 0 to {limit - 1}"


def steps_back(t: np.ndarray) -> bool:
    """Whether a time is less than the one before it."""
    return bool((t[1:] < t[:-1]).any())


def make_recording(
    columns: Columns,
    size: tuple[int, ...],
    path: Path,
    error: Callable[[Path, str], DataError] = damaged,
) -> Recording:
    """Check the events of a file and sort them by time.

    Raises:
        DataError: an event of `path` lies outside the sensor, or has no valid time; by `error`.
    """
    for problem in _problems(columns, size):
        raise error(path, problem)
    x, y, p, t = columns
    t = t.astype(np.int64)
    if steps_back(t):  # the clock of a camera may step back
        order = np.argsort(t, kind="stable")
        x, y, p, t = x[order], y[order], p[order], t[order]
    return Recording(x.astype(np.uint16), y.astype(np.uint16), p.astype(np.uint8), t, size)


@dataclass(frozen=True)
class RecordingSet:
    """Labelled recordings on disk; only the labels are in memory.

    Args:
        size: of a frame: (P, H, W) of a sensor, or (W,) for audio.
        labels: int64 `[N]`.
        files: all files that hold the recordings.
        read: returns an iterator over the recordings, in the order of `labels`.
    """

    size: tuple[int, ...]
    labels: np.ndarray
    files: tuple[Path, ...]
    read: Callable[[], Iterator[Recording | Sound]]

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def of_files(
        cls,
        size: tuple[int, ...],
        files: Files,
        read: Callable[[Path], Recording | Sound],
    ) -> RecordingSet:
        """Return recordings of which each file holds one."""
        return cls(size, files.labels, files.paths, partial(map, read, files.paths))
