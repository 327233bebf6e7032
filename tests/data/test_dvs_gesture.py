"""DVS128 Gesture from synthetic files, and from real recordings if available."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spikefuse import data
from tests.data.writing import aedat3_bytes, random_columns, real, real_data, write_gestures


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPIKEFUSE_CACHE_DIR", str(tmp_path / "cache"))


def gestures(seed: int) -> list:
    """Three gestures of classes 1, 11 and 4, of 200 events each."""
    return [(c, random_columns(200, (128, 128), seed + c)) for c in (1, 11, 4)]


@pytest.mark.parametrize("place", ["", "dvs_gesture", "dvs_gesture/DvsGesture"])
def test_cuts_trials_into_gestures(tmp_path: Path, place: str) -> None:
    write_gestures(tmp_path / place, {"train": [gestures(0), gestures(50)], "test": [gestures(99)]})
    train, test = data.load("dvs_gesture", tmp_path, num_steps=4)
    assert train.labels.tolist() == [0, 10, 3, 0, 10, 3]
    assert test.labels.tolist() == [0, 10, 3]
    for part, seeds in ((train, (0, 50)), (test, (99,))):
        written = [columns for seed in seeds for _, columns in gestures(seed)]
        expected = np.zeros((len(written), 4, 2, 128, 128), np.uint8)
        for n, (x, y, p, _) in enumerate(written):
            np.add.at(expected[n], (np.arange(200) // 50, p, y, x), 1)
        np.testing.assert_array_equal(part.pixels.numpy(), expected)


def test_time_counts_from_the_start_of_the_gesture(tmp_path: Path) -> None:
    write_gestures(tmp_path, {"train": [gestures(0)], "test": [gestures(9)]})
    train, _ = data.load("dvs_gesture", tmp_path, by="duration", dt=100_000, num_steps=3)
    assert train.pixels.sum((1, 2, 3, 4)).tolist() == [200] * 3


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match=r"trials_to_train\.txt is neither .*research\.ibm"):
        data.load("dvs_gesture", tmp_path)
    write_gestures(tmp_path, {"train": [gestures(0)], "test": [gestures(9)]})
    table = tmp_path / "user00_test_labels.csv"
    text = table.read_text()
    for broken in ("class,startTime_usec,endTime_usec\n", text.replace("\n11,", "\n12,"), "a\nb"):
        table.write_text(broken)
        with pytest.raises(data.DataError, match=r"user00_test_labels\.csv is damaged"):
            data.load("dvs_gesture", tmp_path)
    table.unlink()
    with pytest.raises(data.DataError, match=r"user00_test_labels\.csv is missing, which trials_"):
        data.load("dvs_gesture", tmp_path)
    table.write_text(text)
    trial = tmp_path / "user00_test.aedat"
    trial.write_bytes(trial.read_bytes()[:-9])
    with pytest.raises(data.DataError, match=r"user00_test\.aedat is damaged"):
        data.load("dvs_gesture", tmp_path)


@pytest.mark.parametrize(
    "row",
    ["1,2000,2000", "1,3000,2000", "1,-5,2000", "1,1,2", f"1,1,{10**30}", "0,1000000,1000099"],
)
def test_impossible_rows_of_a_table_are_named(tmp_path: Path, row: str) -> None:
    """Ranges of time that are empty, negative, or outside the trial, and a class of 0."""
    write_gestures(tmp_path, {"train": [gestures(0)], "test": [gestures(9)]})
    table = tmp_path / "user00_train_labels.csv"
    table.write_text(f"class,startTime_usec,endTime_usec\n{row}\n")
    with pytest.raises(data.DataError, match=r"user00_train(_labels\.csv|\.aedat) is damaged"):
        data.load("dvs_gesture", tmp_path)


def test_an_impossible_event_between_gestures_is_named(tmp_path: Path) -> None:
    write_gestures(tmp_path, {"train": [gestures(0)], "test": [gestures(9)]})
    columns = random_columns(9, (128, 128), 0)
    columns[0][4] = 128
    trial = tmp_path / "user00_train.aedat"
    packets = aedat3_bytes(columns)
    trial.write_bytes(trial.read_bytes() + packets[packets.index(b"END-HEADER\r\n") + 12 :])
    with pytest.raises(data.DataError, match=r"user00_train\.aedat is damaged .*x = 128"):
        data.load("dvs_gesture", tmp_path)


@real_data
def test_real_recordings(tmp_path: Path) -> None:
    """Four real gestures as one trial: every event is counted once."""
    packed = np.load(real("dvs_gesture/dvs_gesture_10.npz"))
    trial = []
    for i in range(4):
        r = packed["raw"][:, packed["offsets"][i] : packed["offsets"][i + 1]].astype(np.int64)
        trial.append((i + 1, (r[0], r[1], r[2] >> 7, (r[2] & 127) << 16 | r[3] << 8 | r[4])))
    write_gestures(tmp_path, {"train": [trial], "test": [trial[:1]]})
    train, _ = data.load("dvs_gesture", tmp_path, num_steps=16)
    assert train.labels.tolist() == [0, 1, 2, 3]
    events = [len(columns[3]) for _, columns in trial]
    assert train.pixels.sum((1, 2, 3, 4)).tolist() == events
    assert train.pixels.sum((2, 3, 4))[:, 0].tolist() == [number // 16 for number in events]
