"""Folders of recordings become frames, with the names of the folders as classes."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from spikefuse import data, isolated
from spikefuse.data import recordings as module
from tests.data.writing import random_columns

SENSOR = "40x30"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPIKEFUSE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    """Five recordings of each of two classes, of 100 and 200 events."""
    for label, name in enumerate(("clap", "wave")):
        (tmp_path / "recordings" / name).mkdir(parents=True)
        for i in range(5):
            columns = random_columns(100 * (label + 1), (30, 40), i)
            arrays = dict(zip("xypt", columns, strict=True))
            np.savez(tmp_path / "recordings" / name / f"{i}.npz", **arrays)
    return tmp_path / "recordings"


def test_classes_split_and_frames(recordings: Path) -> None:
    described = data.event_folder(recordings, SENSOR, num_steps=4)
    assert described.classes == ("clap", "wave")
    assert described.shape == (2, 30, 40)
    train, test = data.load(described)
    assert train.labels.bincount().tolist() == [4, 4]
    assert test.labels.tolist() == [0, 1]
    for part in (train, test):
        assert part.pixels.shape[1:] == (4, 2, 30, 40)
        assert part.pixels.flatten(1).sum(1).tolist() == [100 * (n + 1) for n in part.labels]
    again = data.load("events", recordings, sensor=SENSOR, num_steps=4)[1]
    assert (again.pixels == test.pixels).all()
    (frames,) = data.read_file(described, recordings / "wave" / "0.npz", num_steps=2)
    assert frames.shape == (2, 2, 30, 40)
    assert frames.sum() == 200


def test_scaled_frames_are_cached_by_sensor(recordings: Path) -> None:
    sums = []
    for sensor in (SENSOR, "60x60", SENSOR):
        described = data.event_folder(recordings, sensor, size=10)
        assert described.shape == (2, 10, 10)
        sums.append(int(data.load(described)[0].pixels.sum()))
    assert sums[0] == sums[2] != sums[1]


def test_one_process_reads_a_folder(recordings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts, start = [], isolated._start
    monkeypatch.setattr(isolated, "_start", lambda: starts.append(start()) or starts[-1])
    for path in recordings.rglob("*.npz"):
        with h5py.File(path.with_suffix(".h5"), "w") as file, np.load(path) as arrays:
            file.update(arrays)
        path.unlink()
    frames = data.load(data.event_folder(recordings, SENSOR, num_steps=4))[0]
    assert frames.pixels.sum() == 4 * 300
    assert len(starts) == 2  # one for each part


def test_frames_may_exceed_the_memory_but_no_recording(
    recordings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = 200 * module.BYTES_PER_EVENT
    monkeypatch.setattr(module, "free_memory", lambda: memory)
    assert data.load(data.event_folder(recordings, SENSOR, num_steps=4))[0].nbytes > memory
    memory -= 1
    with pytest.raises(data.DataError, match=r"wave.\d\.npz needs at least"):
        data.load(data.event_folder(recordings, SENSOR, num_steps=5))


def test_errors(recordings: Path) -> None:
    with pytest.raises(data.DataError, match=r"sensor is not given, .*0\.npz does not tell it"):
        data.event_folder(recordings)
    with pytest.raises(data.DataError, match="by is 'half': expected one of number"):
        data.event_folder(recordings, SENSOR, by="half")
    with pytest.raises(data.DataError, match=r"a\.txt is not a file of the dataset: .* \.aedat or"):
        data.read_file(data.event_folder(recordings, SENSOR), "a.txt")
    (recordings / "clap" / "5.npz").write_bytes(b"PK")
    with pytest.raises(data.DataError, match=r"5\.npz is damaged"):
        data.load(data.event_folder(recordings, SENSOR))


def test_recordings_of_different_sensors_need_a_size(recordings: Path) -> None:
    content = b"#!AER-DAT2.0\n" + np.array([1, 5], ">u4").tobytes()
    (recordings / "wave" / "5.aedat").write_bytes(content)
    with pytest.raises(data.DataError, match=r"5\.aedat is of a sensor of 128x128, .*40x30: set"):
        data.load(data.event_folder(recordings, SENSOR))
    assert len(data.load(data.event_folder(recordings, SENSOR, size=16))[0]) == 9


def test_a_format_of_one_sensor_needs_no_other(tmp_path: Path) -> None:
    content = b"#!AER-DAT2.0\n" + np.array([1, 5], ">u4").tobytes()
    for i in range(12):
        path = tmp_path / "ab"[i % 2] / f"{i}.aedat"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    found = data.load(data.event_folder(tmp_path, "346x260"))[0]
    assert found.shape[-2:] == (128, 128)


def test_files_of_other_endings_are_said(recordings: Path) -> None:
    (recordings / "clap" / "0.txt").touch()
    with pytest.warns(
        UserWarning, match=r"skipped 1 of .*0\.txt: only those that end in \.aedat, "
    ):
        data.event_folder(recordings, SENSOR)
