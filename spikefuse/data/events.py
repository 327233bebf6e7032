"""Recordings of an event camera or of an artificial cochlea.

Shape legend: E events, P polarities, H rows, W columns or units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spikefuse.data.files import damaged


@dataclass(frozen=True)
class Events:
    """One recording, in order of time.

    Args:
        x: column, or unit of an audio recording, `[E]`.
        y: row `[E]`; 0 in audio.
        p: polarity `[E]`, 1 where the brightness rose; 0 in audio.
        t: int64 `[E]`, microseconds from the start of the recording, never falling.
        size: of the sensor: (P, H, W), or (W,) for audio.
    """

    x: np.ndarray
    y: np.ndarray
    p: np.ndarray
    t: np.ndarray
    size: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.t)

    @property
    def sites(self) -> np.ndarray:
        """int64 `[E]`: position of every event in the flattened sensor, `(p H + y) W + x`."""
        if len(self.size) == 1:
            return self.x.astype(np.int64)
        _, height, width = self.size
        return (self.p.astype(np.int64) * height + self.y) * width + self.x


def make_events(
    x: np.ndarray,
    y: np.ndarray,
    p: np.ndarray,
    t: np.ndarray,
    size: tuple[int, ...],
    path: Path,
) -> Events:
    """Events of a file, checked against the sensor and put in order of time.

    Raises:
        DataError: an event lies outside the sensor; `path` is named.
    """
    polarities, height, width = size if len(size) == 3 else (1, 1, size[0])
    for name, values, limit in (("x", x, width), ("y", y, height), ("p", p, polarities)):
        if len(values) and not 0 <= int(values.min()) <= int(values.max()) < limit:
            outside = values[(values < 0) | (values >= limit)][0]
            raise damaged(path, f"an event has {name} = {outside}, the sensor {limit} of them")
    t = t.astype(np.int64)
    if len(t) and (np.diff(t) < 0).any():  # a camera's clock may step back
        order = np.argsort(t, kind="stable")
        x, y, p, t = x[order], y[order], p[order], t[order]
    return Events(x.astype(np.uint16), y.astype(np.uint16), p.astype(np.uint8), t, size)


@dataclass(frozen=True)
class Recordings:
    """Labelled recordings on disk, of which only the labels have been read.

    Args:
        size: of the sensor: (P, H, W), or (W,) for audio.
        labels: int64 `[N]`.
        files: all files that they are read from.
        read: begins to read: gives every recording, in the order of `labels`.
    """

    size: tuple[int, ...]
    labels: np.ndarray
    files: tuple[Path, ...]
    read: Callable[[], Iterator[Events]]

    def __len__(self) -> int:
        return len(self.labels)
