"""The data module splits the examples of a dataset, or takes those published for validation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from spikefuse import data
from spikefuse.train import ConfigError, DataModule, TrainConfig

CONFIG = TrainConfig(model="mlp", num_steps=2, batch_size=256, epochs=2)


def test_the_data_module_splits_as_the_command_does() -> None:
    examples = DataModule(CONFIG)
    examples.setup("fit")
    rest, test = data.load("digits")
    assert len(examples.training) + len(examples.validation) == len(rest)
    assert torch.equal(examples.test.pixels, test.pixels)
    before = examples.training
    examples.setup("test")
    assert examples.training is before
    inputs, labels = next(iter(examples.train_dataloader()))
    assert (inputs.dtype, inputs.shape, labels.shape) == (torch.uint8, (256, 1, 8, 8), (256,))
    with pytest.raises(ConfigError, match="batch_size is 9999: digits has only 1295 training"):
        DataModule(TrainConfig(batch_size=9999)).setup()


def test_too_few_examples_to_hold_some_out(monkeypatch: pytest.MonkeyPatch) -> None:
    train_part, test = data.load("digits")
    for count, held_out in ((30, 3), (4, 0)):
        part = train_part[:count]
        monkeypatch.setattr(DataModule, "load", lambda self, part=part: (part, test))
        examples = DataModule(TrainConfig(batch_size=4))
        if held_out:
            examples.setup()
            assert (len(examples.training), len(examples.validation)) == (27, held_out)
        else:
            with pytest.raises(data.DataError, match="digits has 4 training examples, too few to"):
                examples.setup()


def test_published_validation_examples_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    train_part, test = data.load("digits")
    parts = train_part[:300], train_part[300:340], test
    monkeypatch.setattr(DataModule, "load", lambda self: parts)
    examples = DataModule(CONFIG)
    examples.setup()
    assert (len(examples.training), len(examples.validation)) == (300, 40)
    assert torch.equal(examples.training.pixels, parts[0].pixels)
    assert torch.equal(examples.test.labels, test.labels)
    wrong = data.Images(parts[1].pixels, parts[1].labels + 10)
    monkeypatch.setattr(DataModule, "load", lambda self: (parts[0], wrong, test))
    with pytest.raises(data.DataError, match="has read validation labels from 10 to 19"):
        DataModule(CONFIG).setup()


def test_the_classes_and_the_shape_are_those_of_a_folder(tmp_path: Path) -> None:
    for name in ("cat", "dog", "fox"):
        (tmp_path / name).mkdir()
        for i in range(10):
            Image.new("RGB", (9, 9)).save(tmp_path / name / f"{i}.png")
    config = TrainConfig(dataset="folder", size=6, grey=True, model="mlp", batch_size=4)
    with pytest.raises(ConfigError, match="the classes of folder are those of its files: load"):
        config.make_network()
    examples = DataModule(config, tmp_path)
    examples.setup()
    config = examples.config
    assert (config.classes, config.shape) == (("cat", "dog", "fox"), (1, 6, 6))
    assert [len(part) for part in (examples.training, examples.validation)] == [21, 3]
    network = config.make_network()
    assert network(torch.zeros(config.num_steps, 2, 1, 6, 6)).shape[1:] == (2, 3)
    assert TrainConfig.from_dict(config.to_dict()) == config
    (tmp_path / "fox").rename(tmp_path / "owl")
    with pytest.raises(ConfigError, match="the run has 3 classes, and the files 3: they differ in"):
        DataModule(config, tmp_path).setup()
    with pytest.raises(data.DataError, match="folder is a dataset of your own files: set data_dir"):
        DataModule(replace(config, classes=None, shape=None)).setup()


def test_recordings_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPIKEFUSE_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("left", "right"):
        (tmp_path / "recordings" / name).mkdir(parents=True)
        for i in range(10):
            arrays = dict.fromkeys("xyp", np.ones(4, int)) | {"t": np.arange(4)}
            np.savez(tmp_path / "recordings" / name / f"{i}.npz", **arrays)
    config = TrainConfig(
        dataset="events",
        sensor="6x5",
        frames="voxel_grid",
        slicing="time",
        num_steps=2,
        batch_size=4,
    )
    examples = DataModule(config, tmp_path / "recordings")
    examples.setup()
    assert examples.config.shape == (2, 5, 6)
    assert examples.config.data.scale == 1 / 8
    inputs, _ = next(iter(examples.train_dataloader()))
    assert inputs[0, :, 1, 1, 1].tolist() == [16, 16]  # two events in each step
