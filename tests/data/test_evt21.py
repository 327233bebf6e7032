"""EVT 2.1: words that were put together by hand, in both orders of their halves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spikefuse import data
from spikefuse.data import recordings
from spikefuse.data.event_files import read_events

HEADER = b"% date 2024-01-01 10:00:00\n% evt 2.1\n% format EVT21;height=720;width=1280\n% end\n"
LEGACY = HEADER.replace(b"1280", b"1280;endianness=legacy")
LAST = (1 << 28) - 1  # the highest word of time


def time(high: int) -> int:
    return 8 << 60 | high << 32


def events(p: int, t: int, x: int, y: int, valid: int) -> int:
    return p << 60 | t << 54 | x << 43 | y << 32 | valid


def write(path: Path, words: list[int], header: bytes = HEADER, swapped: bool = False) -> Path:
    halves = np.array(words, "<u8").view("<u4").reshape(-1, 2)
    path.write_bytes(header + (halves[:, ::-1] if swapped else halves).tobytes())
    return path


@pytest.mark.parametrize(("header", "swapped"), [(HEADER, False), (LEGACY, True), (HEADER, True)])
def test_words(tmp_path: Path, header: bytes, swapped: bool) -> None:
    words = [
        events(1, 1, 5, 6, 1),  # without a time
        time(LAST),
        events(1, 62, 64, 3, 1 << 30 | 0b101),
        0xA << 60 | 63 << 54,  # a trigger
        events(0, 63, 1248, 719, 1 << 31),
        time(0),  # 2**34 microseconds have passed
        events(0, 2, 0, 0, 1),
        events(1, 3, 9, 9, 0),
    ]
    recording = read_events(write(tmp_path / "a.raw", words, header, swapped))
    assert recording.size == (2, 720, 1280)
    assert recording.x.tolist() == [64, 66, 94, 1279, 0]
    assert recording.y.tolist() == [3, 3, 3, 719, 0]
    assert recording.p.tolist() == [1, 1, 1, 0, 0]
    assert recording.t.tolist() == [0, 0, 0, 1, 4]


def test_headers(tmp_path: Path) -> None:
    words = [time(0), events(1, 1, 37, 36, 1)]
    old = b"% evt 2.1\n% geometry 40x37\n"
    assert read_events(write(tmp_path / "a.raw", words, old)).size == (2, 37, 40)
    path = write(tmp_path / "a.raw", words, b"% evt 2.1\n% end\n")
    assert read_events(path, "38x37").size == (2, 37, 38)
    with pytest.raises(data.DataError, match="sensor is not given"):
        read_events(path)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (HEADER + bytes(9), "9 bytes are not a multiple of 8, one word"),
        (b"% evt 2.1\n% end", "it ends inside its header"),
        (HEADER + (5 << 60 | 5 << 28).to_bytes(8, "little"), "it has words of unknown types"),
        (
            HEADER + np.array([time(0), events(1, 0, 1260, 0, 1 << 25)], "<u8").tobytes(),
            "an event has x = 1285",
        ),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "a.raw").write_bytes(content)
    with pytest.raises(data.DataError, match=rf"a\.raw is damaged \({what}"):
        read_events(tmp_path / "a.raw")


def test_a_recording_without_events_is_not_damaged(tmp_path: Path) -> None:
    (tmp_path / "a.raw").write_bytes(HEADER)
    with pytest.raises(data.DataError, match=r"a\.raw cannot be read \(it has no event\)"):
        read_events(tmp_path / "a.raw")


def test_events_that_do_not_fit_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.raw", [time(0), events(1, 0, 0, 0, 0xFFFFFFFF)])
    monkeypatch.setattr(recordings, "free_memory", lambda: 31 * recordings.BYTES_PER_EVENT)
    with pytest.raises(data.DataError, match="needs at least"):
        read_events(path)
