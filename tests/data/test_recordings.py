"""Events of a file are validated and sorted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spikefuse.data import DataError
from spikefuse.data.recordings import make_recording

COLUMNS = [np.array(v) for v in ([3, 1, 2], [0, 1, 0], [1, 0, 0], [30, 10, 20])]


def test_events_are_put_in_order_of_time() -> None:
    events = make_recording(tuple(COLUMNS), (2, 2, 4), Path("file"))
    assert events.t.tolist() == [10, 20, 30]
    assert events.x.tolist() == [1, 2, 3]
    assert events.sites.tolist() == [(0 * 2 + 1) * 4 + 1, 2, (1 * 2 + 0) * 4 + 3]
    assert len(events) == 3


@pytest.mark.parametrize("size", [(2, 2, 3), (2, 1, 4), (1, 2, 4), (3,)])
def test_an_event_outside_the_sensor_names_the_file(size: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"^some/file is damaged .*an event has [xyp] = "):
        make_recording(tuple(COLUMNS), size, Path("some/file"))
