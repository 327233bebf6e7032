"""SHD and SSC from synthetic HDF5 files, and from real spikes if available."""

from __future__ import annotations

import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from spikefuse import data, isolated
from tests.data.writing import real, real_data


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPIKEFUSE_CACHE_DIR", str(tmp_path / "cache"))


def write(path: Path, times: list, units: list, labels: np.ndarray) -> None:
    """Ragged times in seconds as float16 and units as uint16, as published."""
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, rows, dtype in (("times", times, np.float16), ("units", units, np.uint16)):
            data_set = file.create_dataset(
                f"spikes/{name}", (len(rows),), h5py.vlen_dtype(np.dtype(dtype))
            )
            for i, row in enumerate(rows):
                data_set[i] = np.asarray(row, dtype)
        file["labels"] = labels.astype(np.uint16)


def spikes(num: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return np.sort(rng.uniform(0, 1.3, num)).astype(np.float16), rng.integers(0, 700, num)


@pytest.mark.parametrize(("name", "num_classes"), [("shd", 20), ("ssc", 35)])
def test_reads_the_published_layout(tmp_path: Path, name: str, num_classes: int) -> None:
    recordings = [spikes(300, seed) for seed in range(4)]
    times, units = [r[0] for r in recordings], [r[1] for r in recordings]
    labels = np.array([0, 5, num_classes - 1, 5])
    write(tmp_path / f"{name}_train.h5", times, units, labels)
    for part in ("valid", "test"):
        write(tmp_path / f"{name}_{part}.h5", times[:1], units[:1], labels[:1])
    train, *_, test = data.load(name, tmp_path)
    assert train.pixels.shape == (4, 100, 700)
    assert train.labels.tolist() == labels.tolist()
    assert len(test) == 1
    expected = np.zeros((4, 100, 700), np.uint8)
    for n in range(4):
        steps = np.rint(times[n].astype(np.float64) * 1e6).astype(int) // 14_000
        np.add.at(expected[n], (steps, units[n]), 1)
    assert expected.sum() == 1200
    np.testing.assert_array_equal(train.pixels.numpy(), expected)
    assert data.expand(train[:2]).shape == (100, 2, 700)


def test_ssc_has_a_validation_set(tmp_path: Path) -> None:
    for label, part in enumerate(("train", "valid", "test")):
        times, units = spikes(50 + label, label)
        write(tmp_path / "ssc" / f"ssc_{part}.h5", [times], [units], np.array([label]))
    parts = data.load("ssc", tmp_path)
    assert [part.labels.tolist() for part in parts] == [[0], [1], [2]]
    assert [int(part.pixels.sum()) for part in parts] == [50, 51, 52]
    (tmp_path / "ssc" / "ssc_valid.h5").unlink()
    with pytest.raises(data.DataError, match=r"ssc: ssc_valid\.h5 is neither in .*zenkelab"):
        data.load("ssc", tmp_path)


@pytest.mark.parametrize("by", ["number", "time"])
def test_slicing_other_than_the_default(tmp_path: Path, by: str) -> None:
    times, units = spikes(300, 0)
    for part in ("train", "test"):
        write(tmp_path / f"shd_{part}.h5", [times], [units], np.array([7]))
    train, _ = data.load("shd", tmp_path, by=by, num_steps=10)
    assert train.pixels.shape == (1, 10, 700)
    assert train.pixels.sum() == 300


def write_both(folder: Path, labels: np.ndarray, units: list) -> None:
    times = [np.zeros(len(row)) for row in units]
    write(folder / "shd_test.h5", times, units, labels)
    write(folder / "shd_train.h5", times, units, labels)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match=r"shd: shd_train\.h5 is neither .*zenkelab"):
        data.load("shd", tmp_path)
    write_both(tmp_path, np.array([20]), [[1, 2]])
    with pytest.raises(
        data.DataError, match=r"shd_train\.h5 is damaged .*a label 20, expected one from 0 to 19"
    ):
        data.load("shd", tmp_path)
    write_both(tmp_path, np.array([3]), [[1, 700]])
    with pytest.raises(data.DataError, match=r"shd_train\.h5 is damaged .*x = 700"):
        data.load("shd", tmp_path)
    write_both(tmp_path, np.array([3, 4]), [[1, 2]])
    with pytest.raises(data.DataError, match=r"2 labels, 1 times, 1 units"):
        data.load("shd", tmp_path)
    write_both(tmp_path, np.array([3]), [[1, 2]])
    with h5py.File(tmp_path / "shd_train.h5", "a") as file:
        file["spikes/times"][0] = np.zeros(3, np.float16)
    with pytest.raises(data.DataError, match=r"recording 0: 3 times, 2 units"):
        data.load("shd", tmp_path)
    with h5py.File(tmp_path / "shd_train.h5", "a") as file:
        del file["spikes"]
    with pytest.raises(data.DataError, match=r"shd_train\.h5 is damaged"):
        data.load("shd", tmp_path)
    whole = (tmp_path / "shd_test.h5").read_bytes()
    (tmp_path / "shd_train.h5").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(data.DataError, match=r"shd_train\.h5 is damaged .*not an HDF5 file"):
        data.load("shd", tmp_path)


@pytest.mark.parametrize(
    ("times", "units", "what"),
    [
        ([0.1, 0.2], [703, 1], "x = 703, expected a whole number from 0 to 699"),
        ([-0.1, 0.2], [3, 1], "t = -99976, expected a whole number"),
        ([0.1, np.inf], [3, 1], "t = inf, expected a whole number"),
        ([0.1, np.nan], [3, 1], "t = nan, expected a whole number"),
    ],
)
def test_impossible_events_are_named(tmp_path: Path, times: list, units: list, what: str) -> None:
    for part in ("train", "test"):
        write(tmp_path / f"shd_{part}.h5", [times], [units], np.array([3]))
    with pytest.raises(data.DataError, match=rf"shd_train\.h5 is damaged .*{what}"):
        data.load("shd", tmp_path)


@pytest.mark.parametrize("labels", [[99], [-1], [2.5], [np.nan], [[3]]])
def test_impossible_labels_are_named(tmp_path: Path, labels: list) -> None:
    write_both(tmp_path, np.array([3]), [[1, 2]])
    with h5py.File(tmp_path / "shd_train.h5", "a") as file:
        del file["labels"]
        file["labels"] = np.array(labels)
    with pytest.raises(data.DataError, match=r"shd_train\.h5 is damaged .*label"):
        data.load("shd", tmp_path)


def test_files_at_which_the_hdf5_library_crashes_or_never_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated, "SECONDS", 3)
    write_both(tmp_path, np.array([3]), [[1, 2]])
    path = tmp_path / "shd_train.h5"
    good = path.read_bytes()
    kind = good.index(b"\x19\x00\x00\x00\x10") + 1  # of an array of any length: neither 0 nor 1
    size = good.index(b"GCOL") + 25  # of an array: its second byte
    crash, end = "h5py crashes", "an array takes more than 3 seconds"
    for at, value, what in ((kind, 2, crash), (size, 8, end)):
        path.write_bytes(good[:at] + bytes([value]) + good[at + 1 :])
        with pytest.raises(data.DataError, match=rf"shd_train\.h5 is damaged \({what}"):
            data.load("shd", tmp_path)


def test_without_h5py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_both(tmp_path, np.array([3]), [[1, 2]])
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(data.DataError, match=r'pip install "spikefuse\[events\]"'):
        data.load("shd", tmp_path)


@real_data
def test_real_spikes(tmp_path: Path) -> None:
    """100 binned test recordings, written as HDF5, give the same bins."""
    packed = np.load(real("shd/shd_test_10ms.npz"))
    bins = np.unpackbits(packed["bits"][:100], axis=2)[..., :700]
    assert not bins[:, :, 0].any()  # channel 700 - unit
    found = [np.nonzero(sample) for sample in bins]
    times = [(step + 0.5) * 0.01 for step, _ in found]
    units = [700 - channel for _, channel in found]
    labels = packed["labels"][:100]
    write(tmp_path / "shd_test.h5", times, units, labels)
    write(tmp_path / "shd_train.h5", times[:1], units[:1], labels[:1])
    _, test = data.load("shd", tmp_path, num_steps=99, dt=10_000, bits=1)
    ours = test.pixels.numpy()
    np.testing.assert_array_equal(ours[:, :, 1:], bins[:, :, :0:-1])
    assert ours.sum() == bins.sum()
    assert torch.equal(test.labels, torch.from_numpy(labels.astype(np.int64)))
