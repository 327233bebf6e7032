"""N-MNIST and N-Caltech101 from synthetic files, and from real recordings if available."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from spikefuse import data
from spikefuse.data.nmnist import CALTECH_CLASSES, read_nmnist
from spikefuse.nn.encode import poisson
from tests.data.writing import Columns, nmnist_bytes, random_columns, real, real_data, write_nmnist


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPIKEFUSE_CACHE_DIR", str(tmp_path / "cache"))


def test_reads_the_published_layout(tmp_path: Path) -> None:
    columns = random_columns(500, (34, 34), 0)
    write_nmnist(tmp_path / "nmnist", {("Train", 7): [columns], ("Test", 2): [columns, columns]})
    train, test = data.load("nmnist", tmp_path, num_steps=5)
    assert train.labels.tolist() == list(range(10))
    assert test.labels.tolist() == [0, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9]
    assert train.pixels.shape == (10, 5, 2, 34, 34)
    assert train.pixels.dtype == torch.uint8
    x, y, p, _ = columns
    expected = np.zeros((5, 2, 34, 34), np.uint8)
    for i in range(500):
        expected[i // 100, p[i], y[i], x[i]] += 1
    np.testing.assert_array_equal(train[7:8].pixels[0].numpy(), expected)
    np.testing.assert_array_equal(test[2:4].pixels.numpy(), np.stack([expected, expected]))


def test_timestamps_have_23_bits(tmp_path: Path) -> None:
    columns = [np.array([value, value]) for value in (33, 0, 1)]
    t = np.array([5, 2**23 - 1])
    (tmp_path / "a.bin").write_bytes(nmnist_bytes((*columns, t)))
    assert read_nmnist(tmp_path / "a.bin").t.tolist() == t.tolist()


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "not a multiple of 5"),
        (bytes(12), "not a multiple of 5"),
        (bytes([34, 0, 0, 0, 0]), "an event has x = 34"),
    ],
)
def test_damaged_file_is_named_and_nothing_is_cached(
    tmp_path: Path, content: bytes, what: str
) -> None:
    write_nmnist(tmp_path, {})
    path = tmp_path / "Train" / "9" / "00000.bin"
    path.write_bytes(content)
    with pytest.raises(data.DataError, match=what) as caught:
        data.load("nmnist", tmp_path)
    assert str(path) in str(caught.value)
    assert not list((tmp_path / "cache").rglob("*.npy"))


def test_missing_folders_are_named_with_the_source(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match=r"nmnist: Train is neither in .*garrickorchard"):
        data.load("nmnist", tmp_path, download=True)
    write_nmnist(tmp_path, {})
    (tmp_path / "Test" / "4" / "00000.bin").unlink()
    with pytest.raises(data.DataError, match=r"no \.bin file in .*4: get Test\.zip"):
        data.load("nmnist", tmp_path)


@real_data
def test_real_recordings(tmp_path: Path) -> None:
    """200 real recordings, written as files: every event is counted once."""
    packed = np.load(real("nmnist/nmnist_small_1100.npz"))
    raw, offsets, labels = packed["raw"], packed["offsets"], packed["labels"]
    write_nmnist(tmp_path, {})
    numbers = np.r_[:180, 1000:1020]
    for i in numbers:
        folder = tmp_path / ("Test" if i >= 1000 else "Train") / str(labels[i])
        (folder / "00000.bin").unlink(missing_ok=True)  # the stand-in
        (folder / f"{i + 1:05}.bin").write_bytes(raw[:, offsets[i] : offsets[i + 1]].T.tobytes())
    parts = zip(data.load("nmnist", tmp_path), (numbers[:180], numbers[180:]), strict=True)
    for frames, chosen in parts:
        order = sorted(chosen, key=lambda i: (labels[i], i))
        per_step = frames.pixels.flatten(2).sum(2)
        real_ones = per_step.sum(1) > 1
        assert frames.labels[real_ones].tolist() == labels[order].tolist()
        # Nothing saturates at 15: the sums are the numbers of events.
        events = np.diff(offsets.astype(np.int64))[order]
        assert per_step[real_ones].sum(1).tolist() == events.tolist()
        assert per_step[real_ones][:, 0].tolist() == (events // 32).tolist()


def test_number_of_bytes_copied_to_the_device(tmp_path: Path) -> None:
    """Copied bytes are at most an eighth of float32 frames; for Poisson only the image."""
    columns = random_columns(3000, (34, 34), 0)
    write_nmnist(tmp_path, {("Train", d): [columns] * 3 for d in range(10)})
    frames, _ = data.load("nmnist", tmp_path)
    batch = frames[torch.randperm(len(frames))[:20]]
    sequence = data.expand(batch.to(torch.device("cpu")))
    assert sequence.shape == (32, 20, 2, 34, 34)
    assert sequence.sum() == 20 * 3000
    assert batch.packed.nbytes * 8 <= sequence.nbytes
    bits = data.load("nmnist", tmp_path, bits=1)[0][:20]
    assert bits.packed.nbytes * 31 <= data.expand(bits).nbytes

    images = data.Images(torch.randint(0, 256, (20, 1, 28, 28), dtype=torch.uint8), batch.labels)
    draws = [
        poisson(data.expand(images), 32, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert images.pixels.nbytes * 4 * 32 == draws[0].nbytes


def write_caltech(folder: Path, recordings: dict[str, list[Columns]]) -> None:
    """Write <class>/image_<number>.bin; other classes get two files of a single event."""
    single = tuple(np.array([value]) for value in (3, 4, 1, 5))
    for name in CALTECH_CLASSES:
        (folder / name).mkdir(parents=True)
        for i, columns in enumerate(recordings.get(name, [single, single]), 1):
            (folder / name / f"image_{i:04}.bin").write_bytes(nmnist_bytes(columns))


@pytest.mark.parametrize("place", ["Caltech101", "ncaltech101/Caltech101"])
def test_reads_the_published_layout_of_caltech101(tmp_path: Path, place: str) -> None:
    columns = random_columns(400, (180, 240), 0)
    ants = [random_columns(10 + i, (180, 240), i) for i in range(21)]
    write_caltech(tmp_path / place, {"yin_yang": [columns, columns], "ant": ants})
    train, test = data.load("ncaltech101", tmp_path, num_steps=4)
    # Of 21 recordings, the first 18 are for training; of two, one.
    assert (len(train), len(test)) == (100 + 18, 100 + 3)
    assert train.labels.unique().tolist() == test.labels.unique().tolist() == [*range(101)]
    label = CALTECH_CLASSES.index("ant")
    counts = [
        part[part.labels == label].pixels.flatten(1).sum(1).tolist() for part in (train, test)
    ]
    assert counts == [[*range(10, 28)], [28, 29, 30]]
    x, y, p, _ = columns
    expected = np.zeros((4, 2, 180, 240), np.uint8)
    np.add.at(expected, (np.arange(400) // 100, p, y, x), 1)
    np.testing.assert_array_equal(test[len(test) - 1 :].pixels[0].numpy(), expected)


def test_files_of_caltech101_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match=r"ncaltech101: BACKGROUND_Google is .*garrickorchard"):
        data.load("ncaltech101", tmp_path)
    write_caltech(tmp_path, {})
    path = tmp_path / "wrench" / "image_0002.bin"
    path.write_bytes(bytes([240, 0, 0, 0, 0]))
    with pytest.raises(data.DataError, match=r"image_0002\.bin is damaged .*x = 240"):
        data.load("ncaltech101", tmp_path, num_steps=1)
    path.unlink()
    with pytest.raises(data.DataError, match=r"wrench has one recording, expected two"):
        data.load("ncaltech101", tmp_path)
