"""CIFAR10-DVS from synthetic files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spikefuse import data
from spikefuse.data.cifar import CLASSES
from spikefuse.data.cifar10_dvs import read_cifar10_dvs
from tests.data.writing import aedat2_bytes, random_columns


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPIKEFUSE_CACHE_DIR", str(tmp_path / "cache"))


def recording(seed: int) -> bytes:
    x, y, p, t = random_columns(90, (128, 128), seed)
    return aedat2_bytes(y << 8 | x << 1 | p, t + 7_000_000)


def write(folder: Path, numbers: tuple[int, ...] = (2, 99, 100, 10)) -> None:
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for number in numbers:
            path = folder / name / f"cifar10_{name}_{number}.aedat"
            path.write_bytes(recording(1000 * label + number))


def test_first_hundred_of_each_class_are_held_out(tmp_path: Path) -> None:
    write(tmp_path / "cifar10_dvs")
    train, test = data.load("cifar10_dvs", tmp_path, num_steps=3)
    assert train.labels.tolist() == list(range(10))
    assert test.labels.tolist() == [label for label in range(10) for _ in range(3)]
    expected = np.zeros((3, 2, 128, 128), np.uint8)
    x, y, p, _ = random_columns(90, (128, 128), 4010)  # in order of the number: 2, 10, 99
    np.add.at(expected, (np.arange(90) // 30, 1 - p, 127 - x, 127 - y), 1)
    np.testing.assert_array_equal(test[13:14].pixels[0].numpy(), expected)


def test_time_counts_from_the_first_event(tmp_path: Path) -> None:
    (tmp_path / "a.aedat").write_bytes(recording(0))
    events = read_cifar10_dvs(tmp_path / "a.aedat")
    _, _, _, t = random_columns(90, (128, 128), 0)
    np.testing.assert_array_equal(events.t, t - t[0])


def test_a_clock_that_steps_back_before_the_first_event(tmp_path: Path) -> None:
    words = aedat2_bytes(np.array([2, 4, 6]), np.array([50, 40, 70]))
    (tmp_path / "a.aedat").write_bytes(words)
    assert read_cifar10_dvs(tmp_path / "a.aedat").t.tolist() == [0, 10, 30]


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match=r"cifar10_dvs: airplane is neither .*figshare"):
        data.load("cifar10_dvs", tmp_path)
    write(tmp_path)
    path = tmp_path / "ship" / "cifar10_ship_100.aedat"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(data.DataError, match=r"cifar10_ship_100\.aedat is damaged"):
        data.load("cifar10_dvs", tmp_path)
    path.unlink()
    with pytest.raises(data.DataError, match=r"ship has 0 recordings from number 100"):
        data.load("cifar10_dvs", tmp_path)
