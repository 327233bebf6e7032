"""AEDAT files written from the specification, valid and damaged."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from spikefuse.data import DataError
from spikefuse.data.aedat import EXTERNAL, read_aedat2, read_aedat3
from tests.data.writing import aedat2_bytes, aedat3_bytes, random_columns


@pytest.mark.parametrize("invalid", [0, 3])
@pytest.mark.parametrize("num", [0, 1, 250])
def test_version_3_gives_the_valid_polarity_events(tmp_path: Path, num: int, invalid: int) -> None:
    columns = random_columns(num, (128, 128), 0)
    (tmp_path / "file").write_bytes(aedat3_bytes(columns, invalid=invalid))
    for read, written in zip(read_aedat3(tmp_path / "file"), columns, strict=True):
        np.testing.assert_array_equal(read, written)


def test_version_3_timestamps_overflow(tmp_path: Path) -> None:
    x, y, p, t = random_columns(50, (128, 128), 1)
    t = t + (3 << 31)
    (tmp_path / "file").write_bytes(aedat3_bytes((x, y, p, t)))
    np.testing.assert_array_equal(read_aedat3(tmp_path / "file")[3], t)


def test_version_2_is_upright_and_an_increase_is_1(tmp_path: Path) -> None:
    """An increase in the upper left corner, then a decrease at column 2 of the last row but one."""
    words = "00007ffe 00000005 000001fb 00000009"
    (tmp_path / "file").write_bytes(b"#!AER-DAT2.0\r\n" + bytes.fromhex(words))
    x, y, p, t = (column.tolist() for column in read_aedat2(tmp_path / "file"))
    assert (x, y, p, t) == ([0, 2], [0, 126], [1, 0], [5, 9])


def test_version_2_times_wrap_around(tmp_path: Path) -> None:
    """One event comes late, behind the first of the next turn."""
    t = np.array([2**32 - 9, 2**32 - 1, 4, 2**32 - 2, 6])
    (tmp_path / "file").write_bytes(aedat2_bytes(np.zeros(5, int), t))
    found = read_aedat2(tmp_path / "file")[3] - 2**32
    assert found.tolist() == [-9, -1, 4, -2, 6]


def test_version_2_splits_the_address(tmp_path: Path) -> None:
    x, y, p, t = random_columns(200, (128, 128), 2)
    address = (127 - y) << 8 | (127 - x) << 1 | (1 - p)
    address[::7] |= EXTERNAL
    (tmp_path / "file").write_bytes(aedat2_bytes(address, t))
    pixels = address & EXTERNAL == 0
    for read, written in zip(read_aedat2(tmp_path / "file"), (x, y, p, t), strict=True):
        np.testing.assert_array_equal(read, written[pixels])


def test_first_event_that_looks_like_a_header(tmp_path: Path) -> None:
    """The end mark of 3.1 ends the header, whatever follows."""
    content = aedat3_bytes(random_columns(0, (128, 128), 0))
    packet = struct.pack("<hhiiiiii", ord("#"), 0, 8, 4, 0, 0, 0, 0)
    (tmp_path / "file").write_bytes(content + packet)
    assert len(read_aedat3(tmp_path / "file")[0]) == 0


THREE = aedat3_bytes(random_columns(150, (128, 128), 0))
TWO = aedat2_bytes(np.arange(20) << 1, np.arange(20))
WIDE = aedat2_bytes(np.array([2, 0x10002]), np.arange(2))
LAST = len(THREE) - 50 * 8  # the first event of the last packet


def with_word(index: int, value: int) -> bytes:
    """The file with another data word (0) or timestamp (1) of the first event of a packet."""
    at = LAST + 4 * index
    return THREE[:at] + struct.pack("<I", value) + THREE[at + 4 :]


def with_header(index: int, value: int) -> bytes:
    """The file with another entry in the header of the last packet."""
    header = list(struct.unpack_from("<hhiiiiii", THREE, LAST - 28))
    header[index] = value
    return THREE[: LAST - 28] + struct.pack("<hhiiiiii", *header) + THREE[LAST:]


DAMAGED = {
    "empty": (read_aedat3, b"", "does not begin with #!AER-DAT3.1"),
    "other version": (read_aedat3, TWO, "does not begin with #!AER-DAT3.1"),
    "other version of 2": (read_aedat2, THREE, "does not begin with #!AER-DAT2.0"),
    "cut in a packet": (read_aedat3, THREE[:-5], "ends inside a packet"),
    "cut in a packet's header": (read_aedat3, THREE[: -50 * 8 - 5], "inside the header of a"),
    "cut in the header": (read_aedat3, THREE[:20], "ends inside its header"),
    "nonsense": (read_aedat3, THREE + bytes(28), "invalid packet header"),
    "time with a sign": (read_aedat3, with_word(1, 1 << 31), "time of an event has 32 bits"),
    "unmarked event": (read_aedat3, with_word(0, 2), "has 49 valid events, its header says 50"),
    "other size of events": (read_aedat3, with_header(2, 12), "events of 12 bytes"),
    "negative overflow": (read_aedat3, with_header(4, -1), "invalid packet header"),
    "address of 17 bits": (read_aedat2, WIDE, "address 0x10002 does not fit"),
    "cut in an event": (read_aedat2, TWO[:-3], "not a multiple of 8"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_named(tmp_path: Path, kind: str) -> None:
    read, content, what = DAMAGED[kind]
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DataError) as caught:
        read(tmp_path / "file")
    assert str(tmp_path / "file") in str(caught.value)
    assert what in str(caught.value)


@pytest.mark.parametrize("read", [read_aedat2, read_aedat3])
def test_a_missing_file_is_named(tmp_path: Path, read) -> None:
    with pytest.raises(DataError, match=r"cannot read .*nothing: No such file"):
        read(tmp_path / "nothing")
