"""The registry describes every dataset consistently."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spikefuse import data


def test_an_unknown_name() -> None:
    with pytest.raises(data.DataError, match="unknown dataset 'minst': choose one of digits"):
        data.load("minst")
    with pytest.raises(TypeError, match="dataset is a NoneType: expected a name or a Dataset"):
        data.load(None)


@pytest.mark.parametrize("name", data.DATASETS)
def test_shape_and_classes(name: str) -> None:
    dataset = data.DATASETS[name]
    numbers = {"imagenet": 1000, "dvs_gesture": 11, "shd": 20, "ssc": 35}
    numbers |= {"cifar100": 100, "cifar100_coarse": 20, "tiny_imagenet": 200, "ncaltech101": 101}
    numbers |= {"speech_commands": 35, "folder": 0, "events": 0}
    assert len(set(dataset.classes)) == len(dataset.classes) == numbers.get(name, 10)
    assert len(dataset.shape) == (1 if name in ("shd", "ssc", "speech_commands") else 3)
    if dataset.kind == "events":
        own = {"sensor", "size", "seed"} if name == "events" else set()
        slicing = {k: v for k, v in dataset.transform.items() if k not in own}
        assert vars(data.Slicing(**slicing)) == slicing


@pytest.mark.parametrize(
    ("name", "option", "options"),
    [
        ("mnist", "num_steps", "none"),
        ("nmnist", "steps", "by, num_steps, .*, content"),
    ],
)
def test_an_unknown_option(name: str, option: str, options: str) -> None:
    with pytest.raises(data.DataError, match=f"has no option '{option}': .* {options}$"):
        data.load(name, "nowhere", **{option: 3})


def test_series_in_files(tmp_path: Path) -> None:
    def read(path: Path, num_steps: int) -> object:
        return iter(np.load(path)[:, :num_steps])

    options = {"kind": "series", "transform": {"num_steps": 4}, "files": (".npy", read)}
    waves = data.Dataset((2,), ("value",), lambda *_: (), **options)
    values = np.random.default_rng(0).normal(size=(3, 9, 2)).astype(np.float32)
    np.save(tmp_path / "a.npy", values)
    found = [*data.read_file(waves, tmp_path / "a.npy", num_steps=5)]
    np.testing.assert_array_equal(found, values[:, :5])
    with pytest.raises(data.DataError, match=r"holds float32 \[9, 2\]: expected float32 \[10, 2\]"):
        next(data.read_file(waves, tmp_path / "a.npy", num_steps=10))
    with pytest.raises(data.DataError, match=r"a\.csv is not a file of .*: .* ends in \.npy"):
        data.read_file(waves, tmp_path / "a.csv")
    called = r"of the dataset is called with \({}, num_steps=4\), which it does not take \("
    with pytest.raises(data.DataError, match="^the read " + called.format("directory, download")):
        data.load(waves, tmp_path)
    without = replace(waves, files=(".npy", lambda path: read(path, 4)))
    with pytest.raises(data.DataError, match="^the reader of files " + called.format("path")):
        data.read_file(without, tmp_path / "a.npy")
    values[0, 1, 1] = np.inf
    np.save(tmp_path / "a.npy", values)
    with pytest.raises(data.DataError, match=r"a\.npy holds values that are not finite"):
        next(data.read_file(waves, tmp_path / "a.npy"))
