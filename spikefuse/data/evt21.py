"""Read Prophesee's EVT 2.1: words of 64 bits, each with up to 32 events in a row of the sensor.

A word has its type from bit 60. A word of events has the lowest 6 bits of their time from bit 54, x
of the first from bit 43, y from bit 32, and in bit i whether there is an event at x + i. A word of
time has the other bits of the time from bit 32. Some cameras write the upper half of a word first.

Source: Prophesee, "EVT 2.1 Format",
https://docs.prophesee.ai/stable/data/encoding_formats/evt21.html
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from spikefuse.data.files import damaged, opened, read_bytes
from spikefuse.data.recordings import Columns, check_memory

HEADER_BYTES = 1 << 16
DECREASE, INCREASE, TIME = 0, 1, 8
TYPES = (DECREASE, INCREASE, TIME, 10, 14, 15)  # the last three are skipped


def is_evt21(path: Path) -> bool:
    """Whether the header of a RAW file names this version."""
    with opened(path) as file:
        return bool(re.search(rb"^% (evt 2\.1|format EVT21)\b", file.read(HEADER_BYTES), re.M))


def read_evt21(path: Path) -> tuple[Columns, tuple[int, int] | None]:
    """Read the events of a file, and columns and rows of the sensor if the header has them."""
    content, start, line = read_bytes(path), 0, b""
    while content[start : start + 1] == b"%" and line != b"% end":
        end = content.find(b"\n", start)
        if end < 0:
            raise damaged(path, "it ends inside its header")
        line, start = content[start:end].strip(), end + 1
    header = content[:start].decode("latin-1")
    if (len(content) - start) % 8:
        raise damaged(path, f"{len(content) - start} bytes are not a multiple of 8, one word")
    lower, upper = np.frombuffer(content, "<u4", offset=start).reshape(-1, 2).T
    if re.search("endianness.legacy", header) or not _are_words(upper):
        lower, upper = upper, lower
    if not _are_words(upper):
        raise damaged(path, "it has words of unknown types")
    check_memory(path, len(upper))
    width = re.search(r"geometry (\d+)x|width=(\d+)", header)
    height = re.search(r"geometry \d+x(\d+)|height=(\d+)", header)
    sensor = (int(width[1] or width[2]), int(height[1] or height[2])) if width and height else None
    return _decode(lower, upper, path), sensor


def _are_words(upper: np.ndarray) -> bool:
    return bool(np.isin(upper >> 28, TYPES).all())


def _decode(lower: np.ndarray, upper: np.ndarray, path: Path) -> Columns:
    is_time = upper >> 28 == TIME
    times = upper[is_time].astype(np.int64) & 0xFFFFFFF
    times += np.cumsum(np.diff(times, prepend=0) < -(1 << 27)) << 28  # they start again at 0
    latest = np.cumsum(is_time) - 1
    is_event = (upper >> 28 <= INCREASE) & (latest >= 0)
    valid, upper = lower[is_event].astype("<u4"), upper[is_event].astype(np.int32)
    bits = np.unpackbits(valid.view(np.uint8), bitorder="little").view(bool)
    check_memory(path, int(np.count_nonzero(bits)))
    places = np.flatnonzero(bits)
    words = places >> 5
    t = ((times[latest[is_event]] << 6) + (upper >> 22 & 63))[words]
    upper = upper[words]
    return (upper >> 11 & 0x7FF) + (places & 31), upper & 0x7FF, upper >> 28, t
