"""Training from Python is the run of the command line."""

from __future__ import annotations

import csv
import json
import warnings
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import spikefuse as sf
from spikefuse.train import ConfigError, TrainConfig
from spikefuse.train.cli import main

SETTINGS = {"dataset": "digits", "num_steps": 2, "batch_size": 512, "epochs": 1}


def tiny(neuron, in_channels, num_classes, size):
    width = in_channels * size[0] * size[1]
    return nn.Sequential(nn.Flatten(), nn.Linear(width, 16), neuron(), nn.Linear(16, num_classes))


def test_fit(tmp_path: Path) -> None:
    """A builder; a complete run is not repeated, and other settings are refused."""
    out, before = tmp_path / "run", torch.get_rng_state()
    result = sf.train.fit(TrainConfig(**SETTINGS), model=tiny, out=out, device="cpu", fuse=False)
    assert torch.equal(torch.get_rng_state(), before)  # the caller's random numbers go on
    assert result == json.loads((out / "result.json").read_text())
    again = sf.train.fit(**SETTINGS, model=tiny, fuse=False, out=str(out), resume=True)
    assert again == result
    with pytest.raises(ConfigError, match=r"the run in .* has lr 0\.001, not 0\.1: choose"):
        sf.train.fit(**SETTINGS, model=tiny, fuse=False, out=out, resume=True, lr=0.1)
    with pytest.raises(ConfigError, match="exists already"):
        sf.train.fit(**SETTINGS, model=tiny, fuse=False, out=out)
    name = f"{tiny.__module__}:tiny"
    net = sf.load(out, model=name)
    assert net.net(torch.rand(2, 3, 1, 8, 8)).shape == (2, 3, 10)


class Shared(nn.Module):
    """Calls one neuron on inputs of `hidden` and of ten neurons."""

    def __init__(self, hidden, neuron, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, 10)
        self.neuron = neuron

    def forward(self, x):
        return self.neuron(self.second(self.neuron(self.first(x.flatten(1)))))


def ten(neuron, in_channels, num_classes, size):
    return Shared(10, neuron(), size[0] * size[1])


def twelve(neuron, in_channels, num_classes, size):
    return Shared(12, neuron(), size[0] * size[1])


@pytest.mark.parametrize("model", [ten, twelve])
def test_a_network_with_a_shared_neuron(tmp_path: Path, model: Any) -> None:
    sf.train.fit(**SETTINGS, model=model, threshold=0.2, out=tmp_path / "run")
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert 0 < float(row["rate_neuron"]) < 1
    # Calls of twelve and of ten neurons have no neurons in common that may be silent.
    assert ("silent_neuron" in row) == (model is ten)
    assert (tmp_path / "run" / "raster.png").exists()


class Traced(sf.Neuron):
    """Spikes and their sum."""

    v = sf.State()
    count = sf.State()

    def __init__(self):
        super().__init__()
        self.surrogate = sf.surrogate.Arctan()

    def step(self, x, v, count):
        spikes = self.surrogate(v + x - 0.2)
        return (spikes, count + spikes), ((v + x) * (1 - spikes), count + spikes)


def traced(neuron, in_channels, num_classes, size):
    class Net(nn.Sequential):
        def forward(self, x):
            return self.readout(self.neuron(self.layer(x.flatten(1)))[0])

    layers = {"layer": nn.Linear(size[0] * size[1], 9), "neuron": Traced()}
    return Net(OrderedDict(layers, readout=nn.Linear(9, num_classes)))


def test_a_neuron_of_several_outputs_has_the_rate_of_the_first(tmp_path: Path) -> None:
    sf.train.fit(**SETTINGS, model=traced, out=tmp_path / "run")
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert 0 < float(row["rate_neuron"]) < 1
    assert 0 <= float(row["silent_neuron"]) < 1


def test_a_run_is_extended_as_by_the_command_line(tmp_path: Path) -> None:
    settings = SETTINGS | {"model": "mlp", "fuse": False, "resume": True}
    for out in ("two", "more"):
        sf.train.fit(**settings, out=tmp_path / out)
    result = sf.train.fit(**settings | {"epochs": 2, "memory": "bits"}, out=tmp_path / "two")
    assert (result["config"]["epochs"], result["resumed"]) == (2, True)
    assert sf.train.fit(**settings | {"epochs": 2}, out=tmp_path / "two") == result
    assert main(["train", "--resume", str(tmp_path / "more"), "--epochs", "2"]) == 0
    extended = json.loads((tmp_path / "more" / "result.json").read_text())
    assert result["test_loss"] == extended["test_loss"]
    with pytest.raises(ConfigError, match=r"epochs is 1: .*last\.ckpt has done 2 already"):
        sf.train.fit(**settings, out=tmp_path / "two")
    with pytest.raises(ConfigError, match=r"the run in .* has schedule constant, not cosine"):
        sf.train.fit(**settings | {"epochs": 3, "schedule": "cosine"}, out=tmp_path / "two")
    settings["schedule"] = "cosine"
    sf.train.fit(**settings, out=tmp_path / "other")
    with pytest.raises(ConfigError, match=r"the run in .* has epochs 1, not 2: choose another"):
        sf.train.fit(**settings | {"epochs": 2}, out=tmp_path / "other")


def test_a_complete_run_without_its_last_checkpoint_is_not_deleted(tmp_path: Path) -> None:
    settings = SETTINGS | {"model": "mlp", "fuse": False, "resume": True, "out": tmp_path / "run"}
    result = sf.train.fit(**settings)
    (tmp_path / "run" / "last.ckpt").unlink()
    assert sf.train.fit(**settings) == result
    with pytest.raises(ConfigError, match=r"checkpoint .*last\.ckpt does not exist"):
        sf.train.fit(**settings | {"epochs": 2})
    assert (tmp_path / "run" / "best.ckpt").exists()


def test_a_run_that_was_stopped(tmp_path: Path) -> None:
    """It is resumed, or started again if it ended in its first epoch."""
    out, settings = tmp_path / "run", SETTINGS | {"model": "mlp", "fuse": False}
    out.mkdir()
    (out / "metrics.csv").write_text("")
    sf.train.fit(**settings, out=out, resume=True)
    (out / "result.json").unlink()
    assert sf.train.fit(**settings, out=out, resume=True)["resumed"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model": nn.Linear(2, 3)},
            r"model is Linear\(.*, which is an object of type Linear: expe",
        ),
        ({"model": partial(tiny)}, "model is functools.partial.*, which has no name"),
        ({"config": "digits"}, r"config is 'digits': expected a TrainConfig, or fit\(dataset="),
        ({"dataset": sf.data.DATASETS["digits"]}, "name it as module:dataset, .* with data_dir"),
    ],
)
def test_objects_that_checkpoints_cannot_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sf.train.fit(**settings)


def test_unknown_settings() -> None:
    with pytest.raises(TypeError, match=r"unknown option 'epoch': did you mean epochs\?"):
        sf.train.fit(epoch=3)
    with pytest.raises(TypeError, match=r"unknown option 'num_step': did you mean num_steps\?"):
        sf.train.fit(TrainConfig(), num_step=2)
    with pytest.raises(TypeError, match="unknown option 'devise': did you mean device"):
        sf.train.fit(devise="cpu")


def photos(folder: Path, count: int = 20) -> dict[str, Any]:
    """Write images of two classes, and return the settings of a run on them."""
    for label, name in enumerate("ab"):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.new("L", (6, 6), 90 + 99 * label).save(folder / name / f"{i}.png")
    own = {"dataset": "folder", "data_dir": folder, "size": 6, "grey": True, "batch_size": 8}
    return {**SETTINGS, **own, "model": "mlp", "fuse": False}


def test_a_run_on_files_is_resumed(tmp_path: Path) -> None:
    """Its settings have the classes and the shape that it found in the files."""
    settings = {**photos(tmp_path / "photos"), "out": tmp_path / "run", "resume": True}
    result = sf.train.fit(**settings)
    assert sf.train.fit(**settings) == result
    (tmp_path / "run" / "result.json").unlink()
    resumed = sf.train.fit(**settings)
    assert resumed["resumed"]
    assert resumed["test_loss"] == result["test_loss"]


def test_examples_that_have_changed(tmp_path: Path) -> None:
    """With one more image, others are drawn for the test, some of which were trained on."""
    settings = photos(tmp_path / "photos")
    place = {"out": tmp_path / "run", "resume": True}
    sf.train.fit(**settings, **place)
    assert main(["eval", str(tmp_path / "run"), "--data-dir", str(settings["data_dir"])]) == 0
    (tmp_path / "run" / "result.json").unlink()
    Image.new("L", (6, 6)).save(settings["data_dir"] / "a" / "more.png")
    with pytest.raises(ConfigError, match="folder now has other examples, or other labels, than"):
        sf.train.fit(**settings, **place)
    with pytest.warns(UserWarning, match="the training examples of folder, or their labels, have"):
        main(["eval", str(tmp_path / "run"), "--data-dir", str(settings["data_dir"])])


def leaky(decay: float) -> Any:
    def build(neuron, in_channels, num_classes, size):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), sf.LIF(decay), nn.Linear(8, 10))

    return build


def test_another_function_of_the_same_name(tmp_path: Path) -> None:
    """`sf.load` would build the network of the earlier run with it."""
    settings = {**SETTINGS, "fuse": False}
    with warnings.catch_warnings(action="error", category=UserWarning):
        sf.train.fit(**settings, model=leaky(0.5), out=tmp_path / "a")
        sf.train.fit(**settings, model=leaky(0.5), out=tmp_path / "b")
    with pytest.warns(UserWarning, match=r"leaky.<locals>.build now is another function"):
        sf.train.fit(**settings, model=leaky(0.9), out=tmp_path / "c")
