"""EVT 2.1 and EVT 3: words that were put together by hand, and an encoder of EVT 3."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spikefuse import data
from spikefuse.data import recordings
from spikefuse.data.event_files import read_events
from tests.data import writing

HEADER = b"% date 2024-01-01 10:00:00\n% evt 2.1\n% format EVT21;height=720;width=1280\n% end\n"
LEGACY = HEADER.replace(b"1280", b"1280;endianness=legacy")
HEADER_3 = b"% evt 3.0\n% format EVT3;height=720;width=1280\n% end\n"
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


def encoded(
    columns: tuple[np.ndarray, ...], rng: np.random.Generator, repeats: bool, first: int = 0
) -> bytes:
    """Write events one by one, as the format is described, with vectors where they are possible."""
    x, y, p, t = (column.tolist() for column in columns)
    words, row, last = [], -1, -1
    begin = base = -1, -1, -1
    i = 0
    while i < len(t):
        time = t[i] + (first << 12)
        for high in range((last >> 12) + 1 if last >= 0 else time >> 12, (time >> 12) + 1):
            words.append(0x8 << 12 | high & 0xFFF)
        if repeats and rng.random() < 0.3:
            words.append(0x8 << 12 | time >> 12 & 0xFFF)
        if time != last:
            words.append(0x6 << 12 | time & 0xFFF)
        last = time
        for kind in rng.choice([0x7, 0xA, 0xE, 0xF], rng.integers(0, 3)).tolist():
            words.append(kind << 12 | int(rng.integers(1 << 12)))
        if y[i] != row:
            row = y[i]
            words.append(row | int(rng.integers(2)) << 11)
        begin = x[i], p[i], row
        size = int(rng.choice([1, 8, 12]))
        if size == 1:
            words.append(0x2 << 12 | p[i] << 11 | x[i])
            i += 1
            continue
        if base != begin:
            words.append(0x3 << 12 | p[i] << 11 | x[i])
        valid, end = 0, x[i] + size
        while i < len(t) and (p[i], y[i], t[i] + (first << 12)) == (*begin[1:], last):
            if not begin[0] <= x[i] < end or valid >> x[i] - begin[0]:
                break
            valid |= 1 << x[i] - begin[0]
            i += 1
        upper = int(rng.integers(16)) << 8 if size == 8 else 0  # not used
        words.append((0x4 if size == 12 else 0x5) << 12 | upper | valid)
        base = end, *begin[1:]  # whether the next vector goes on there
    return np.array(words, "<u2").tobytes()


@pytest.mark.parametrize("first", [0, 0xFFE, 0xFFF])
@pytest.mark.parametrize("repeats", [False, True])
def test_evt3(tmp_path: Path, first: int, repeats: bool) -> None:
    rng = np.random.default_rng(first)
    rows, steps = 300, 4
    y, p = rng.integers(0, 720, rows), rng.integers(0, 2, rows)
    t = np.cumsum(rng.choice([1, 100, 4096, 8192, 2_000_000], rows))
    x = rng.integers(0, 1180, rows)[:, None] + np.cumsum(rng.integers(1, 20, (rows, steps)), 1)
    columns = x.reshape(-1), *(np.repeat(column, steps) for column in (y, p, t))
    (tmp_path / "a.raw").write_bytes(HEADER_3 + encoded(columns, rng, repeats, first))
    recording = read_events(tmp_path / "a.raw")
    assert recording.size == (2, 720, 1280)
    assert t[-1] - t[0] > 3 << 24  # the clock starts again several times
    for name, expected in zip("xypt", (*columns[:3], columns[3] - t[0]), strict=True):
        np.testing.assert_array_equal(getattr(recording, name), expected, name)


def test_words_of_evt3(tmp_path: Path) -> None:
    words = [
        *(0x6000, 0x0003, 0x2001, 0x3005, 0x4001),  # without a time
        *(0x8002, 0x2001),  # the lower bits are 0
        *(0x6005, 0x8002, 0x2002),  # they remain
        0x5001,  # its base came before the time
        *(0x3806, 0x4801, 0x2009, 0x5F82, 0x5001),
        *(0x8001, 0x2004),  # the clock has stepped back
    ]
    header = b"% format evt3.0;height=720;width=1280\n"
    (tmp_path / "a.raw").write_bytes(header + np.array(words, "<u2").tobytes())
    recording = read_events(tmp_path / "a.raw")
    assert recording.x.tolist() == [4, 1, 2, 6, 17, 9, 19, 25, 26]
    assert recording.p.tolist() == [0, 0, 0, 1, 1, 0, 1, 1, 1]
    assert set(recording.y) == {3}
    assert recording.t.tolist() == [0, 4096, *[4101] * 7]


@pytest.mark.parametrize("start", [0, 0x25 << 12, 0xFFE << 12])
def test_evt3_of_faery(tmp_path: Path, start: int) -> None:
    """Its header has no end, and its words of time are those that differ."""
    t = np.arange(start, 40_000_000 + start, 100_000)
    x = y = p = np.ones(len(t), np.int64)
    writing.write_by_faery(tmp_path / "a.raw", (x, y, p, t), (4, 4))
    np.testing.assert_array_equal(read_events(tmp_path / "a.raw").t, t - start)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (HEADER_3 + bytes(9), "9 bytes are not a multiple of 2, one word"),
        (HEADER_3 + b"\0\x10", "it has words of unknown types"),
        (
            HEADER_3 + np.array([0x8000, 0, 0x34FE, 0x4008], "<u2").tobytes(),
            "an event has x = 1281",
        ),
    ],
)
def test_damage_of_evt3_is_named(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "a.raw").write_bytes(content)
    with pytest.raises(data.DataError, match=rf"a\.raw is damaged \({what}"):
        read_events(tmp_path / "a.raw")


@pytest.mark.parametrize("words", [[], [0x4001], [0x8000, 0x6001], [0x8000, 0, 0x4001]])
def test_evt3_without_events(tmp_path: Path, words: list[int]) -> None:
    (tmp_path / "a.raw").write_bytes(HEADER_3 + np.array(words, "<u2").tobytes())
    with pytest.raises(data.DataError, match=r"a\.raw cannot be read \(it has no event\)"):
        read_events(tmp_path / "a.raw")
