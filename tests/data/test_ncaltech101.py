"""N-Caltech101 from synthetic files in its published format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spikefuse import data
from spikefuse.data.ncaltech101 import CLASSES
from tests.data.writing import Columns, nmnist_bytes, random_columns


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPIKEFUSE_CACHE_DIR", str(tmp_path / "cache"))


def write(folder: Path, recordings: dict[str, list[Columns]]) -> None:
    """Write <class>/image_<number>.bin; other classes get two files of a single event."""
    single = tuple(np.array([value]) for value in (3, 4, 1, 5))
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
        for i, columns in enumerate(recordings.get(name, [single, single]), 1):
            (folder / name / f"image_{i:04}.bin").write_bytes(nmnist_bytes(columns))


@pytest.mark.parametrize("place", ["Caltech101", "ncaltech101/Caltech101"])
def test_reads_the_published_layout(tmp_path: Path, place: str) -> None:
    columns = random_columns(400, (180, 240), 0)
    ants = [random_columns(10 + i, (180, 240), i) for i in range(21)]
    write(tmp_path / place, {"yin_yang": [columns, columns], "ant": ants})
    train, test = data.load("ncaltech101", tmp_path, num_steps=4)
    # Of 21 recordings, the first 18 are for training; of two, one.
    assert (len(train), len(test)) == (100 + 18, 100 + 3)
    assert train.labels.unique().tolist() == test.labels.unique().tolist() == [*range(101)]
    label = CLASSES.index("ant")
    counts = [
        part[part.labels == label].pixels.flatten(1).sum(1).tolist() for part in (train, test)
    ]
    assert counts == [[*range(10, 28)], [28, 29, 30]]
    x, y, p, _ = columns
    expected = np.zeros((4, 2, 180, 240), np.uint8)
    np.add.at(expected, (np.arange(400) // 100, p, y, x), 1)
    np.testing.assert_array_equal(test[len(test) - 1 :].pixels[0].numpy(), expected)


def test_files_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match=r"ncaltech101: BACKGROUND_Google is .*garrickorchard"):
        data.load("ncaltech101", tmp_path)
    write(tmp_path, {})
    path = tmp_path / "wrench" / "image_0002.bin"
    path.write_bytes(bytes([240, 0, 0, 0, 0]))
    with pytest.raises(data.DataError, match=r"image_0002\.bin is damaged .*x = 240"):
        data.load("ncaltech101", tmp_path, num_steps=1)
    path.unlink()
    with pytest.raises(data.DataError, match=r"wrench has one recording, expected two"):
        data.load("ncaltech101", tmp_path)
