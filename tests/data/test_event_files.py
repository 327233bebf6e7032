"""Each format gives the events that were written, and damage is named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from spikefuse import data
from spikefuse.data import event_files, recordings
from spikefuse.data.event_files import read_events
from tests.data import writing
from tests.data.writing import Columns, aedat2_bytes, aedat3_bytes, nmnist_bytes, random_columns

SIZE = (30, 40)
COLUMNS = random_columns(200, SIZE, 0)


def write(path: Path, columns: Columns = COLUMNS) -> Path:
    """Write events in the format of the ending, with 1000 microseconds before the first."""
    x, y, p, t = columns
    named: dict[str, Any] = {"x": x, "y": y, "p": p, "t": t + 1000}
    match path.suffix:
        case ".npz":
            np.savez(path, **named)
        case ".npy":
            np.save(path, np.rec.fromarrays(list(named.values()), names=list(named)))
        case ".csv":
            rows = np.stack([t + 1000, x, y, 2 * p - 1], 1)
            np.savetxt(path, rows, "%d", ",", header="t,x,y,polarity", comments="")
        case ".h5":
            with h5py.File(path, "w") as file:
                for name, values in named.items():
                    file[f"events/{name}"] = values
        case ".hdf5":
            with h5py.File(path, "w") as file:
                file["CD/events"] = np.rec.fromarrays(list(named.values()), names=list(named))
        case ".bin":
            path.write_bytes(nmnist_bytes((x, y, p, t + 1000)))
        case ".aedat":
            path.write_bytes(aedat3_bytes((x, y, p, t + 1000)))
        case _:
            writing.write_by_faery(path, (x, y, p, t + 1000), SIZE)
    return path


# Formats that tell the size of the sensor, and others.
TELLING = [".aedat4", ".raw", ".dat", ".es"]
OTHERS = [".npz", ".npy", ".csv", ".h5", ".hdf5", ".bin", ".aedat"]


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8", "uint64", "bool", "float32"])
def test_times_of_any_type(tmp_path: Path, dtype: str) -> None:
    """The difference of two times may need more bits than each."""
    first, last = (0, 1)
    if dtype not in ("bool", "float32"):
        first, last = np.iinfo(dtype).min, min(np.iinfo(dtype).max, 2**40 - 1)
    times = np.array([first, last], dtype)
    np.savez(tmp_path / "a.npz", x=[0, 1], y=[2, 3], p=[0, 1], t=times)
    assert read_events(tmp_path / "a.npz", "40x30").t.tolist() == [0, last - first]


@pytest.mark.parametrize("ending", TELLING + OTHERS)
def test_reads_what_was_written(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path / f"a{ending}")
    recording = read_events(path, None if ending in TELLING else "40x30")
    assert recording.size == (2, *SIZE)
    x, y, p, t = COLUMNS
    # Events of one time have no order.
    found = sorted(zip(recording.t, recording.x, recording.y, recording.p, strict=True))
    assert found == sorted(zip(t - t[0], x, y, p, strict=True))


@pytest.mark.parametrize("version", ["evt2", "evt3"])
def test_versions_of_evt(tmp_path: Path, version: str) -> None:
    writing.write_by_faery(tmp_path / "a.raw", COLUMNS, SIZE, version=version)
    assert len(read_events(tmp_path / "a.raw")) == 200


@pytest.mark.parametrize(("kind", "what"), [(0, "events of the older type Event2D"), (14, "trig")])
def test_dat_of_other_types_is_not_damaged(tmp_path: Path, kind: int, what: str) -> None:
    header = b"% Version 2\n% Height 30\n% Width 40\n"
    (tmp_path / "a.dat").write_bytes(header + bytes([kind, 8, *[0] * 8]))
    with pytest.raises(data.DataError, match=rf"a\.dat holds {what}.*: expected .*\(EventCD\)"):
        read_events(tmp_path / "a.dat")


def test_aedat2_is_of_a_dvs128(tmp_path: Path) -> None:
    (tmp_path / "a.aedat").write_bytes(aedat2_bytes(np.array([5 << 8 | 3 << 1 | 1]), np.array([9])))
    recording = read_events(tmp_path / "a.aedat")
    assert recording.size == (2, 128, 128)
    assert [*recording.x, *recording.y, *recording.p, *recording.t] == [124, 122, 0, 0]


def test_overflows_in_files_of_nmnist(tmp_path: Path) -> None:
    """A row of 240 adds 2**13 microseconds to the times behind it."""
    rows = ([1, 2, 5], [0, 240, 0], [3, 4, 7])
    content = b"".join(bytes([x, y, 128, 0, t]) for x, y, t in rows)
    (tmp_path / "a.bin").write_bytes(content)
    recording = read_events(tmp_path / "a.bin", "34x34")
    assert recording.x.tolist() == [1, 3]
    assert recording.t.tolist() == [0, 2**13 + 2]


def test_scaling_and_the_crop_at_the_centre(tmp_path: Path) -> None:
    """30 rows become 15, 40 columns 20, of which 2 are left out on the left and 3 on the right."""
    columns = tuple(np.array(v) for v in ([3, 4, 5, 34, 39], [0, 29, 2, 3, 4], [1] * 5, [0] * 5))
    recording = read_events(write(tmp_path / "a.npz", columns), "40x30", 15)  # type: ignore[arg-type]
    assert recording.size == (2, 15, 15)
    assert recording.x.tolist() == [0, 0]
    assert recording.y.tolist() == [14, 1]
    recording = read_events(write(tmp_path / "a.npz"), "40x30", 10)
    assert recording.x.max() < 10


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.npy", b"\x93NUMPY", "not arrays of events"),
        ("a.npz", b"PK", "not arrays of events"),
        ("a.bin", bytes(4), "4 bytes are not a multiple of 5"),
        ("a.aedat4", b"#!AER-DAT4.0\r\n", "RuntimeError: failed to fill"),
        ("a.es", b"E", "RuntimeError: failed to fill"),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, content: bytes, what: str) -> None:
    if "RuntimeError" in what:
        pytest.importorskip("faery")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(data.DataError, match=rf"{name} is damaged \({what}"):
        read_events(tmp_path / name, "40x30")


WANTED = ".*; expected columns x, y, p and t, named in the first line, with commas between"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("t,x,y\n1,2,3\n", f"it has no p among t, x, y{WANTED}"),
        ("1,2,3,1\n4,2,3,1\n", f"it has no x among 1, 2, 3{WANTED}"),
        ("t;x;y;p\n1;2;3;1\n", f"could not convert string '1;2;3;1'{WANTED}"),
        ("t,x,y,p\n1,2,3\n", f"3 columns, of which the first line names 4{WANTED}"),
        ("t,x,y,p\n1,2,3,7\n", "an event has p = 7, expected a whole number from 0 to 1"),
        (
            "t,x,y,p\n0.5,2,3,1\n1.2,2,3,1\n",
            "an event has t = 0.7, expected a whole number of microseconds from 0 to .*",
        ),
    ],
)
def test_what_is_wrong_with_a_table_is_named(tmp_path: Path, content: str, what: str) -> None:
    """Of a user's own file, there may be no intact copy."""
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(data.DataError, match=rf"a\.csv cannot be read \({what}\): correct it, or"):
        read_events(tmp_path / "a.csv", "40x30")


NO_EVENTS = tuple(np.zeros(0, int) for _ in range(4))


@pytest.mark.parametrize("ending", [*TELLING, *OTHERS])
def test_recordings_without_events_are_not_damaged(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a{ending}"
    path.write_bytes(b"")
    with pytest.raises(data.DataError, match=r"cannot be read \(it is empty\): .* or remove it$"):
        read_events(path, "40x30")
    if ending in (".npz", ".npy", ".csv", ".h5", ".hdf5", ".aedat"):
        write(path, NO_EVENTS)
        with pytest.raises(data.DataError, match=r"read \(it has no event\): .* or remove it$"):
            read_events(path, "40x30")


@pytest.mark.parametrize("ending", [".npy", ".npz", ".h5"])
def test_arrays_without_columns_are_not_damaged(tmp_path: Path, ending: str) -> None:
    path, array = tmp_path / f"a{ending}", np.zeros((5, 4), np.float32)
    match ending:
        case ".npy":
            np.save(path, array)
        case ".npz":
            np.savez(path, events=array)
        case _:
            with h5py.File(path, "w") as file:
                file["events"] = array
    what = (
        r"read \(.*an array float32 \[5, 4\] without fields: expected x, y, p, t\): .* remove it$"
    )
    with pytest.raises(data.DataError, match=what):
        read_events(path, "40x30")
    if ending == ".h5":
        path.write_bytes(b"no such file")
        with pytest.raises(data.DataError, match=r"cannot be read \(.*not an HDF5 file"):
            read_events(path, "40x30")


def test_times_in_seconds_are_named(tmp_path: Path) -> None:
    x, y, p, t = COLUMNS
    path = write(tmp_path / "a.npz", (x, y, p, t / 1e6))
    with pytest.raises(data.DataError, match=r"cannot be read \(.* whole number of microseconds"):
        read_events(path, "40x30")


@pytest.mark.parametrize("dtype", [np.uint32, np.int32])
def test_times_of_32_bits_that_wrap_around_are_refused(tmp_path: Path, dtype: type) -> None:
    x, last = np.zeros(4, int), np.iinfo(dtype).max
    np.savez(tmp_path / "a.npz", x=x, y=x, p=x, t=np.array([0, 9, last, last + 3]).astype(dtype))
    what = rf"event 3 has t = \S+ after {last}, where a clock of 32 bits wraps .* as int64, with 2"
    with pytest.raises(data.DataError, match=what):
        read_events(tmp_path / "a.npz", "1x1")
    np.savez(tmp_path / "a.npz", x=x, y=x, p=x, t=np.array([9, 0, 4, 2], dtype))
    assert read_events(tmp_path / "a.npz", "1x1").t.tolist() == [0, 2, 4, 9]


def test_columns_have_the_same_names_in_all_formats(tmp_path: Path) -> None:
    values = dict.fromkeys(("xs", "ys", "on", "timestamp"), np.array([0, 1]))
    np.savez(tmp_path / "a.npz", **values)
    np.savez(tmp_path / "b.npz", events=np.rec.fromarrays(list(values.values()), names=[*values]))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.update(values)
    for name in ("a.npz", "b.npz", "a.h5"):
        assert read_events(tmp_path / name, "2x2").sites.tolist() == [0, 7]
    np.savez(tmp_path / "a.npz", **{**values, "on": np.zeros(3)})
    with pytest.raises(data.DataError, match="x, y, p and t have 2, 2, 3, 2 values"):
        read_events(tmp_path / "a.npz", "2x2")


@pytest.mark.parametrize(
    ("more", "found"), [("timestamp", "t and timestamp"), ("polarity", "p and polarity")]
)
def test_two_columns_for_one_are_refused(tmp_path: Path, more: str, found: str) -> None:
    values = dict.fromkeys(("x", "y", "p", "t", more), np.array([0, 1]))
    table = np.rec.fromarrays(list(values.values()), names=[*values])
    np.savez(tmp_path / "a.npz", **values)
    np.save(tmp_path / "a.npy", table)
    np.savetxt(tmp_path / "a.csv", table, "%d", ",", header=",".join(values), comments="")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.update(values)
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["events"] = table
    for name in ("a.npz", "a.npy", "a.csv", "a.h5", "b.h5"):
        with pytest.raises(data.DataError, match=rf"has {found}, which all mean {found[0]}: rem"):
            read_events(tmp_path / name, "2x2")


def test_a_column_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x,y,p,t,T\n1,1,0,5,0\n")
    with pytest.raises(data.DataError, match="it has t and t, which all mean t: remove or rename"):
        read_events(path, "2x2")
    path.write_text("x,y,p,t,,\n1,1,0,5,0,0\n")
    assert len(read_events(path, "2x2")) == 1


@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_polarities_are_of_one_kind(tmp_path: Path, dtype: str) -> None:
    path, x = tmp_path / "a.npz", np.zeros(3, int)
    for p, expected in (([0, 1, 0], [0, 1, 0]), ([-1, 1, -1], [0, 1, 0]), ([-1, -1, -1], [0] * 3)):
        np.savez(path, x=x, y=x, p=np.array(p, dtype), t=np.arange(3))
        assert read_events(path, "1x1").p.tolist() == expected
    for p in ([-1, 0, -1], [-1, 0, 1]):
        np.savez(path, x=x, y=x, p=np.array(p, dtype), t=np.arange(3))
        with pytest.raises(data.DataError, match="p has both -1 and 0: expected 0 and 1, or -1"):
            read_events(path, "1x1")


def test_a_header_at_which_faery_aborts(tmp_path: Path) -> None:
    """It claims to be longer than the memory that the process has."""
    path = write(tmp_path / "a.aedat4")
    content = bytearray(path.read_bytes())
    content[len("#!AER-DAT4.0\r\n") + 3] = 0x7F
    path.write_bytes(content)
    with pytest.raises(data.DataError, match=r"a\.aedat4 is damaged \(faery crashes"):
        read_events(path)


@pytest.mark.parametrize("ending", [".raw", ".npz", ".bin", ".aedat"])
def test_recordings_that_do_not_fit_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    path = write(tmp_path / f"a{ending}")
    for module in (event_files, recordings):
        monkeypatch.setattr(module, "free_memory", lambda: 199 * recordings.BYTES_PER_EVENT)
    with pytest.raises(data.DataError, match=r"a\..* needs at least .* cut it into"):
        read_events(path, "40x30")
    monkeypatch.setattr(recordings, "free_memory", lambda: path.stat().st_size - 1)
    with pytest.raises(data.DataError, match=r"a\..* needs at least .* cut it into"):
        read_events(path, "40x30")


def test_the_sensor_must_be_known_and_fit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npz")
    with pytest.raises(data.DataError, match=r"sensor is not given, .*a\.npz does not tell"):
        read_events(path)
    with pytest.raises(data.DataError, match="sensor is '40': expected columns and rows, such as"):
        read_events(path, "40")
    with pytest.raises(
        data.DataError,
        match=r"sensor is \(40, 30\): expected columns and rows, such as the string '346x260'",
    ):
        read_events(path, (40, 30))
    with pytest.raises(data.DataError, match=r"event at column 39 .*, outside of the sensor 30x40"):
        read_events(path, "30x40")


def test_without_faery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faery", None)
    (tmp_path / "a.es").write_bytes(b"E")
    with pytest.raises(data.DataError, match=r'faery, .*pip install "spikefuse\[events\]"'):
        read_events(tmp_path / "a.es")
