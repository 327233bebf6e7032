"""Events of a file are validated and sorted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spikefuse.data import DataError
from spikefuse.data.recordings import Recording, make_recording

COLUMNS = [np.array(v) for v in ([3, 1, 2], [0, 1, 0], [1, 0, 0], [30, 10, 20])]


def test_events_are_sorted_by_time() -> None:
    events = make_recording(tuple(COLUMNS), (2, 2, 4), Path("file"))
    assert events.t.tolist() == [10, 20, 30]
    assert events.x.tolist() == [1, 2, 3]
    assert events.sites.tolist() == [(0 * 2 + 1) * 4 + 1, 2, (1 * 2 + 0) * 4 + 3]
    assert len(events) == 3


@pytest.mark.parametrize("size", [8, None, (), (34, 34), (2, 0, 4), (2, 34.0, 34), "234"])
def test_sizes_that_are_none(size: object) -> None:
    with pytest.raises(DataError, match=r"^size is .*: expected \(P, H, W\), or \(W,\) for audio"):
        Recording([0], [0], [0], [0], size)


@pytest.mark.parametrize("size", [(2, 2, 3), (2, 1, 4), (1, 2, 4), (3,)])
def test_an_event_outside_the_sensor_names_the_file(size: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"^some/file is damaged .*an event has [xyp] = "):
        make_recording(tuple(COLUMNS), size, Path("some/file"))


@pytest.mark.parametrize(
    ("column", "values", "what"),
    [
        (0, [3, -1, 2], "x = -1, expected a whole number from 0 to 3"),
        (0, [3, 1.5, 2], "x = 1.5, expected a whole number from 0 to 3"),
        (0, [3, np.nan, 2], "x = nan, expected a whole number from 0 to 3"),
        (1, [0, 1, 2], "y = 2, expected a whole number from 0 to 1"),
        (2, [0, 1, 2], "p = 2, expected a whole number from 0 to 1"),
        (3, [30, -10, 20], "t = -10, expected a whole number of microseconds from 0 to"),
        (3, [30, np.inf, 20], "t = inf, expected a whole number of microseconds from 0 to"),
        (3, [30, np.nan, 20], "t = nan, expected a whole number of microseconds from 0 to"),
        (3, [30, 1e30, 20], r"t = 1e\+30, expected a whole number of microseconds from 0 to"),
    ],
)
def test_impossible_values_of_events(column: int, values: list[float], what: str) -> None:
    columns = list(COLUMNS)
    columns[column] = np.array(values)
    with pytest.raises(DataError, match=f"^some/file is damaged .*an event has {what}"):
        make_recording(tuple(columns), (2, 2, 4), Path("some/file"))


@pytest.mark.parametrize(
    ("t", "what"),
    [
        ([30, 10, 20], "event 1 has t = 10 after 30: sort the events by time"),
        ([-30, 10, 20], "an event has t = -30, expected a whole number of microseconds from 0 to"),
        ([1, 2], r"x, y, p, t are .*: expected whole numbers \[E\] for E events"),
        ([1.0, 2.0, 3.0], r"x, y, p, t are .*float64"),
    ],
)
def test_recordings_are_checked(t: list[int], what: str) -> None:
    """Frames are computed for events in order of time: others were counted at negative steps."""
    with pytest.raises(DataError, match=f"^{what}"):
        Recording(*COLUMNS[:3], np.array(t), (2, 2, 4))
    with pytest.raises(DataError, match=r"^an event has x = 3, expected"):
        Recording(*COLUMNS[:3], np.array([1, 2, 3]), (2, 2, 3))


def test_recordings_of_lists() -> None:
    recording = Recording([3, 1], [0, 1], [1, 0], [10, 20], (2, 2, 4))
    assert recording.sites.tolist() == [(1 * 2 + 0) * 4 + 3, (0 * 2 + 1) * 4 + 1]
    assert len(Recording([], [], [], [], (2, 2, 4))) == 0
    for wrong in ([0.5, 1], ["a", "b"], [[1], [2, 3]], [None, 1]):
        with pytest.raises(DataError, match=r"whole numbers"):
            Recording(wrong, [0, 1], [1, 0], [10, 20], (2, 2, 4))
