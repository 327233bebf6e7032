"""Read Prophesee's EVT 2.1 and EVT 3, whose words hold several events in a row of the sensor.

A word of EVT 2.1, of 64 bits, has its type from bit 60. A word of events has the lowest 6 bits of
their time from bit 54, x of the first from bit 43, y from bit 32, and in bit i whether there is an
event at x + i. A word of time has the other bits of the time from bit 32. Some cameras write the
upper half of a word first.

A word of EVT 3, of 16 bits, has its type from bit 12, and replaces a part of what the events behind
it share: y, the higher or lower 12 bits of the time, or the x at which vectors begin. A vector has
in bit i whether there is an event at x + i, and the next one begins behind it.

Source: Prophesee, "EVT 2.1 Format" and "EVT 3.0 Format",
https://docs.prophesee.ai/stable/data/encoding_formats/
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from spikefuse.data.files import damaged, opened, read_bytes
from spikefuse.data.recordings import Columns, check_memory

HEADER_BYTES = 1 << 16
VERSION = re.compile(rb"(?mi)^% (?:evt |format EVT)(2\.?1|3)\b")
DECREASE, INCREASE, TIME = 0, 1, 8
TYPES = (DECREASE, INCREASE, TIME, 10, 14, 15)  # the last three are skipped
Y, X, BASE, VECTOR_12, VECTOR_8, TIME_LOW, TIME_HIGH = 0, 2, 3, 4, 5, 6, 8
WIDTHS, MASKS = np.zeros(16, np.uint8), np.zeros(16, np.uint16)
WIDTHS[[VECTOR_12, VECTOR_8]] = 12, 8
MASKS[[VECTOR_12, VECTOR_8]] = 0xFFF, 0xFF
# The last four are skipped.
TYPES_3 = (Y, X, BASE, VECTOR_12, VECTOR_8, TIME_LOW, TIME_HIGH, 7, 10, 14, 15)


def is_evt(path: Path) -> bool:
    """Whether the header of a RAW file names one of these versions."""
    with opened(path) as file:
        return VERSION.search(file.read(HEADER_BYTES)) is not None


def read_evt(path: Path) -> tuple[Columns, tuple[int, int] | None]:
    """Read the events of a file, and columns and rows of the sensor if the header has them."""
    content, start, line = read_bytes(path), 0, b""
    # Lines of the header begin with "% ", and a first word may begin with "%".
    while content.startswith(b"% ", start) and line != b"% end":
        end = content.find(b"\n", start)
        if end < 0:
            raise damaged(path, "it ends inside its header")
        line, start = content[start:end].strip(), end + 1
    header = content[:start].decode("latin-1")
    version = VERSION.search(content, 0, start)
    is_3 = version is not None and version[1] == b"3"
    size = 2 if is_3 else 8
    if (len(content) - start) % size:
        raise damaged(path, f"{len(content) - start} bytes are not a multiple of {size}, one word")
    width = re.search(r"geometry (\d+)x|width=(\d+)", header)
    height = re.search(r"geometry \d+x(\d+)|height=(\d+)", header)
    sensor = (int(width[1] or width[2]), int(height[1] or height[2])) if width and height else None
    if is_3:
        return _decode_3(np.frombuffer(content, "<u2", offset=start), path), sensor
    lower, upper = np.frombuffer(content, "<u4", offset=start).reshape(-1, 2).T
    if re.search("endianness.legacy", header) or not _are_words(upper):
        lower, upper = upper, lower
    if not _are_words(upper):
        raise damaged(path, "it has words of unknown types")
    check_memory(path, len(upper))
    return _decode_21(lower, upper, path), sensor


def _are_words(upper: np.ndarray) -> bool:
    return bool(np.isin(upper >> 28, TYPES).all())


def _decode_21(lower: np.ndarray, upper: np.ndarray, path: Path) -> Columns:
    is_time = upper >> 28 == TIME
    times = _continued(upper[is_time] & 0xFFFFFFF, 28)
    latest = np.cumsum(is_time) - 1
    is_event = (upper >> 28 <= INCREASE) & (latest >= 0)
    valid, upper = lower[is_event].astype("<u4"), upper[is_event].astype(np.int32)
    t = (times[latest[is_event]] << 6) + (upper >> 22 & 63)
    return _expanded(valid, (upper >> 11 & 0x7FF, upper & 0x7FF, upper >> 28, t), path)


def _decode_3(words: np.ndarray, path: Path) -> Columns:
    return _expanded(*_vectors(words, path), path)


def _vectors(words: np.ndarray, path: Path) -> tuple[np.ndarray, Columns]:
    """Return the bits of words of events in EVT 3, and x, y, p and t of the lowest one."""
    check_memory(path, len(words) // 2)  # what follows takes half as much as for an event
    kinds = (words >> 12).astype(np.uint8)
    if not np.isin(np.unique(kinds), TYPES_3).all():
        raise damaged(path, "it has words of unknown types")
    rows, (clock, times) = np.flatnonzero(kinds == Y), _times(words, kinds)
    start = max(rows[0], clock[0]) if len(rows) and len(clock) else len(words)
    bases = start + np.flatnonzero(kinds[start:] == BASE)
    first = bases[0] if len(bases) else len(words)
    is_event = (kinds == X) | (kinds == VECTOR_12) | (kinds == VECTOR_8)
    is_event[:start] = False  # a row or the time is unknown, and so is where a vector begins
    is_event[start:first] &= kinds[start:first] == X
    events = np.flatnonzero(is_event)
    check_memory(path, len(events))
    kinds, content = kinds[events], words[events]
    is_single = kinds == X
    valid = (content & MASKS[kinds]).astype("<u2")
    valid[is_single] = 1

    # A vector begins at its base, behind those between.
    passed = np.zeros(len(events) + 1, np.int64)
    np.cumsum(WIDTHS[kinds], out=passed[1:])
    vectors = np.flatnonzero(~is_single)
    latest = np.searchsorted(bases, events[vectors]) - 1
    content[vectors] = words[bases[latest]]
    x = (content & 0x7FF).astype(np.int32)
    x[vectors] += passed[vectors] - passed[np.searchsorted(events, bases)][latest]
    y = words[rows[np.searchsorted(rows, events) - 1]] & 0x7FF
    t = times[np.searchsorted(clock, events) - 1]
    return valid, (x, y, content >> 11 & 1, t)


def _times(words: np.ndarray, kinds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which words of EVT 3 set a time, and the times."""
    clock = np.flatnonzero((kinds == TIME_LOW) | (kinds == TIME_HIGH))
    is_high, values = kinds[clock] == TIME_HIGH, (words[clock] & 0xFFF).astype(np.int64)
    # Lower bits have no meaning before there are higher ones, which are 0 after a change of these;
    # cameras also repeat the higher ones.
    is_set = np.cumsum(is_high) > 0
    is_set[is_high] = np.diff(values[is_high], prepend=-1) != 0
    clock, is_high, values = clock[is_set], is_high[is_set], values[is_set]
    high = _continued(values[is_high], 12)[np.cumsum(is_high) - 1]
    return clock, (high << 12) + np.where(is_high, 0, values)


def _continued(values: np.ndarray, bits: int) -> np.ndarray:
    """Continue a clock that starts again at 0, as Prophesee's decoders: a decrease by less than
    half of its range is a step back."""
    values = values.astype(np.int64)
    wraps = np.diff(values, prepend=values[:1]) <= -(1 << bits - 1)
    return values + (np.cumsum(wraps) << bits)


def _expanded(valid: np.ndarray, columns: Columns, path: Path) -> Columns:
    """Return the events of words, given their bits, and the columns of the lowest one."""
    bits = np.unpackbits(valid.view(np.uint8), bitorder="little").view(bool)
    check_memory(path, int(np.count_nonzero(bits)))
    places, size = np.flatnonzero(bits), 8 * valid.itemsize
    del bits
    steps = (places % size).astype(np.uint8)
    places //= size
    x, y, p, t = (column[places] for column in columns)
    return x + steps, y, p, t
