"""Recipes are read like command-line options, and the project's own are valid."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from spikefuse.train.config import TrainConfig
from spikefuse.train.fields import ConfigError
from spikefuse.train.recipe import RECIPES, read

Spikefuse = Callable[..., int]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_of_the_project(name: str) -> None:
    config = TrainConfig(**read(Path(name)))
    assert config.make_network()
    text = (ROOT / "docs" / "reproduce.md").read_text()
    assert re.search(rf"--config {name}\s", text)


def test_a_recipe_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"No such file.*; a recipe is called radlif-shd$"):
        read(Path("radlif-shf"))


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def test_values_convert_as_on_the_command_line(tmp_path: Path) -> None:
    text = "lr: 1e-3\nprecision: 32\nbatch-size: 64\nclip: 1\nflip: yes\n"
    settings = read(written(tmp_path, text))
    assert settings == {"lr": 1e-3, "precision": "32", "batch_size": 64, "clip": 1, "flip": True}


def test_decimal_numbers(tmp_path: Path) -> None:
    text = "lr: 1E-3\nclip: 05.\nema: .5\nseed: +10\nepochs: 10\nwarmup: 2.5e+0\nmixup: 0\n"
    settings = read(written(tmp_path, text))
    numbers = {"lr": 1e-3, "clip": 5.0, "ema": 0.5, "seed": 10, "epochs": 10, "warmup": 2.5}
    assert settings == {**numbers, "mixup": 0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch: 5", "config {path}: unknown option 'epoch': did you mean epochs?"),
        ("colour: 5", "config {path}: unknown option 'colour'; see spikefuse train --help"),
        (
            "data-dir: here",
            "config {path}: data_dir is accepted on the command line only: pass --data-dir",
        ),
        ("config: a.yaml", "config {path}: config is accepted on the command line only: pass --c"),
        (
            "logger: csv",
            "config {path}: logger is accepted on the command line only: pass --logger",
        ),
        (
            "time-ranks: 2",
            "config {path}: time_ranks is accepted on the command line only: pass --time-ranks",
        ),
        ("lr: fast", "config {path}: lr is 'fast': expected a number"),
        ("epochs: 0", "config {path}: epochs is 0: expected a whole number of at least 1"),
        ("- lr", "config {path}: expected lines like 'lr: 0.1', an option and its value"),
        ("", "config {path}: expected lines like 'lr: 0.1', an option and its value"),
        (
            "lr: 1\nepochs: 2\nlr: 2",
            "config {path}: lr is given twice, again in line 3: remove one",
        ),
        (
            "batch-size: 1\nbatch_size: 2",
            "config {path}: batch_size is given twice, again in line 2: remove one",
        ),
        ("lr: 1\nmodel: [mlp]", "config {path}: line 2: expected one value, as in 'lr: 0.1'"),
        ("model: {mlp: 1}", "config {path}: line 1: expected one value, as in 'lr: 0.1'"),
        ("[mlp]: 1", "config {path}: line 1: expected one value, as in 'lr: 0.1'"),
        ("<<: &a {lr: 1}", "config {path}: line 1: expected one value, as in 'lr: 0.1'"),
        ("model: !!python/name:os.system", "config {path}, line 1: not YAML: expected lines lik"),
        ("model: " + "[" * 5000, "config {path}: not YAML: expected lines like 'lr: 0.1'"),
        ("model: " + "{a: " * 5000, "config {path}: not YAML: expected lines like 'lr: 0.1'"),
        ("lr: " + "9" * 5000, "config {path}: not YAML: expected lines like 'lr: 0.1'"),
        ("lr: " + "9" * 400, "config {path}: lr is a number of 1329 bits: expected a number"),
        ("epochs: " + "9" * 20, "config {path}: epochs is " + "9" * 20 + ": expected a whole num"),
        ("model: 2020-13-45", "config {path}: not YAML: expected lines like 'lr: 0.1'"),
        *(
            (
                f"lr: 1\n{entry}",
                f"config {{path}}: line 2: {name} is '{value}': expected a decimal n",
            )
            for entry in ("seed: 010", "epochs: 1_0", "clip: 1:30", "num-steps: 0x10", "ema: .9_9")
            for name, value in [entry.replace("-", "_").split(": ")]
        ),
        ("lr: 1_0e-3", "config {path}: lr is '1_0e-3': expected a number"),
        ("lr: .inf", "config {path}: line 1: lr is '.inf': expected a decimal number"),
        ("model:", "config {path}: unknown model None: choose one of mlp"),
        ("lr: 1\nlr: [", "config {path}, line 2: not YAML: expected lines like 'lr: 0.1'"),
    ],
)
def test_invalid_recipes(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert str(caught.value).startswith(message.format(path=path))
    assert "\n" not in str(caught.value)


def test_command_line_overrides_the_recipe(
    spikefuse: Spikefuse, tmp_path: Path, small: list[str]
) -> None:
    path = written(tmp_path, "model: mlp\nepochs: 3\nlr: 0.01\n")
    assert spikefuse("train", "--config", path, *small, "--epochs", "1", "--out", "run") == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    config = TrainConfig.from_dict(result["config"])
    assert (config.model, config.epochs, config.lr) == ("mlp", 1, 0.01)


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(lr=1e-7),
        TrainConfig(dataset="folder", size=8, classes=("a", "b"), shape=(3, 8, 8)),
        TrainConfig(dataset="shd", model="mlp", schedule="one-cycle", optimizer="adamw"),
        TrainConfig(model="event-mlp", encoding="poisson"),
    ],
)
def test_settings_of_a_result_are_a_recipe(tmp_path: Path, config: TrainConfig) -> None:
    path = written(tmp_path, json.dumps(config.to_dict(), indent=1))
    assert TrainConfig(**read(path)) == replace(config, classes=None, shape=None)
    result = {"test_accuracy": 0.5, "resumed": False, "config": config.to_dict(), "device": "cpu"}
    assert read(written(tmp_path, json.dumps(result, indent=2))) == read(path)
