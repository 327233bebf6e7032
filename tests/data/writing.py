"""Writers of the datasets' file formats, for the tests of their readers."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spikefuse.data.files import default_directory

# Columns x, y, p, t of the events of one recording.
Columns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]

DATA = default_directory()
real_data = pytest.mark.skipif(
    not DATA.is_dir(),
    reason="no real data: neither SPIKEFUSE_DATA nor a folder data/ in the checkout",
)


def real(name: str) -> Path:
    """Return the path of a file of real data."""
    return DATA / name


def random_columns(num: int, size: tuple[int, int], seed: int, last: int = 300_000) -> Columns:
    """`num` events in order of time on a sensor of (H, W), the last before `last` microseconds."""
    rng = np.random.default_rng(seed)
    height, width = size
    x, y, p = rng.integers(0, width, num), rng.integers(0, height, num), rng.integers(0, 2, num)
    return x, y, p, np.sort(rng.integers(0, last, num))


def nmnist_bytes(columns: Columns) -> bytes:
    """x, y, then polarity and 23 bits of time, big-endian: five bytes per event."""
    x, y, p, t = columns
    return np.stack([x, y, p << 7 | t >> 16, t >> 8 & 255, t & 255], 1).astype(np.uint8).tobytes()


def aedat2_bytes(address: np.ndarray, t: np.ndarray) -> bytes:
    """Version 2.0: pairs of big-endian uint32, address and microseconds."""
    words = np.stack([address, t], 1).astype(">u4")
    return b"#!AER-DAT2.0\r\n# This is a raw AE data file\r\n# created\r\n" + words.tobytes()


def aedat3_bytes(columns: Columns, packet: int = 100, invalid: int = 0) -> bytes:
    """Version 3.1: packets of polarity events, with another type of packet before each.

    Args:
        columns: the valid events.
        packet: events per packet.
        invalid: events without the valid mark, put at the end of each packet.
    """
    x, y, p, t = columns
    data = np.asarray(x) << 17 | np.asarray(y) << 2 | np.asarray(p) << 1 | 1
    content = b"#!AER-DAT3.1\r\n#Format: RAW\r\n#Source 1: DVS128\r\n#!END-HEADER\r\n"
    for start in range(0, len(t), packet):
        part = slice(start, start + packet)
        words = np.stack([data[part], t[part] & 0x7FFFFFFF], 1)
        words = np.concatenate([words, np.full((invalid, 2), 2)])
        num = len(words)
        content += struct.pack("<hhiiiiii", 0, 1, 8, 4, 0, 2, 2, 2) + bytes(16)  # special events
        header = (1, 1, 8, 4, int(t[start]) >> 31, num, num, num - invalid)
        content += struct.pack("<hhiiiiii", *header) + words.astype("<u4").tobytes()
    return content


def wav_bytes(
    samples: np.ndarray,
    rate: int = 16_000,
    channels: int = 1,
    bits: int = 16,
    form: int = 1,
    others: bytes = b"",
) -> bytes:
    """RIFF with the chunks "fmt ", `others` and "data", of whole numbers of `bits` bits."""
    content = samples.astype(f"<i{bits // 8}").tobytes()
    size = channels * bits // 8
    header = struct.pack("<4sIHHIIHH", b"fmt ", 16, form, channels, rate, rate * size, size, bits)
    chunks = header + others + struct.pack("<4sI", b"data", len(content)) + content
    return struct.pack("<4sI4s", b"RIFF", 4 + len(chunks), b"WAVE") + chunks


def write_nmnist(folder: Path, recordings: dict[tuple[str, int], list[Columns]]) -> None:
    """Write Train/<label>/<number>.bin and Test/...; missing labels get one single-event file."""
    single = tuple(np.array([value]) for value in (3, 4, 1, 5))
    for part in ("Train", "Test"):
        for label in range(10):
            place = folder / part / str(label)
            place.mkdir(parents=True)
            for i, columns in enumerate(recordings.get((part, label), [single])):
                (place / f"{i:05}.bin").write_bytes(nmnist_bytes(columns))


def write_gestures(folder: Path, trials: dict[str, list[list[tuple[int, Columns]]]]) -> None:
    """Write trials with their tables; a trial is a list of (class from 1, events).

    Args:
        folder: gets the files.
        trials: the trials of "train" and of "test".
    """
    folder.mkdir(parents=True, exist_ok=True)
    for part, content in trials.items():
        names = []
        for i, gestures in enumerate(content):
            names.append(f"user{i:02}_{part}.aedat")
            rows, parts, start = [], [], 1_000_000
            for label, (x, y, p, t) in gestures:
                end = start + int(t[-1]) + 1
                rows.append(f"{label},{start},{end}")
                parts.append((x, y, p, t + start))
                start = end + 50_000
                stray = tuple(np.array([value]) for value in (1, 2, 0, end))
                parts.append(stray)  # between two gestures: belongs to neither
            columns = tuple(np.concatenate(column) for column in zip(*parts, strict=True))
            (folder / names[-1]).write_bytes(aedat3_bytes(columns))
            table = "class,startTime_usec,endTime_usec\n" + "\n".join(rows) + "\n"
            (folder / names[-1].replace(".aedat", "_labels.csv")).write_text(table)
        (folder / f"trials_to_{part}.txt").write_text("\n".join(names) + "\n")


def write_by_faery(path: Path, columns: Columns, size: tuple[int, int], **options: Any) -> None:
    """Write events by faery, in the format of the ending, on a sensor of (H, W)."""
    faery = pytest.importorskip("faery")
    events = np.zeros(len(columns[0]), faery.EVENTS_DTYPE)
    for name, values in zip(("x", "y", "on", "t"), columns, strict=True):
        events[name] = values
    faery.events_stream_from_array(events, size[::-1]).to_file(path, **options)
