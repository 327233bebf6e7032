"""Users' own models and datasets: from their strings to runs, checkpoints and predictions."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import spikefuse as sf
from spikefuse.data import DATASETS, DataError, Dataset, Frames, Series
from spikefuse.models import MODELS
from spikefuse.train import ConfigError, TrainConfig, from_python, own, predict, recipe
from spikefuse.train.batches import load_examples

Spikefuse = Callable[..., int]
CODE = Path(__file__).parent / "programs" / "my_code.py"
OWN = ["--model", "my_code:small", "--dataset", "my_code:shapes"]
TRAIN = [
    "train",
    "--batch-size",
    "27",
    "-T",
    "2",
    "--epochs",
    "2",
    "--lr",
    "0.01",
    "--device",
    "cpu",
]


def forget(modules: list[str]) -> None:
    for registry in own.REGISTRIES.values():
        for name in [name for name in registry if name.partition(":")[0] in modules]:
            del registry[name]
    for name in modules:
        sys.modules.pop(name, None)


@pytest.fixture
def here(spikefuse: Spikefuse, tmp_path: Path) -> Iterator[Path]:
    """A working directory with my_code.py, which this process has not imported."""
    path = list(sys.path)
    shutil.copy(CODE, tmp_path)
    yield tmp_path
    forget(["my_code", "my_broken", "my_needy"])
    sys.path[:] = path


def test_a_run_evaluation_and_prediction(
    here: Path, spikefuse: Spikefuse, capsys: pytest.CaptureFixture[str]
) -> None:
    own_code = "--model", "my_code:small", "--dataset", "my_code:squares"
    assert spikefuse(*TRAIN, *own_code) == 0
    run = here / "runs" / "my_code.squares-my_code.small-1"
    result = json.loads((run / "result.json").read_text())
    assert (result["config"]["model"], result["test_images"]) == ("my_code:small", 30)
    Image.fromarray(np.zeros((9, 12), np.uint8)).save(here / "a.png")
    commands = ("eval", run / "best.ckpt"), ("predict", run / "best.ckpt", here / "a.png")
    for command in commands:  # this process has imported the code
        assert spikefuse(*command) == 0
    evaluated = capsys.readouterr().out
    assert f"test accuracy {100 * result['test_accuracy']:.2f} %" in evaluated
    for command in commands:
        forget(["my_code"])
        assert spikefuse(*command) == 2
        assert "my_code" not in sys.modules
        error = capsys.readouterr().err
        assert "its model is 'my_code:small', and importing that would execute code" in error
        assert "add --model my_code:small, or model='my_code:small' in Python" in error
        assert spikefuse(command[0], *own_code, *command[1:]) == 0
        assert capsys.readouterr().out[:40] in evaluated


def test_load_imports_only_what_the_caller_names(here: Path, spikefuse: Spikefuse) -> None:
    assert spikefuse(*TRAIN, *OWN, "--epochs", "1", "--out", "run") == 0
    forget(["my_code"])
    with pytest.raises(ConfigError, match="its model is 'my_code:small'"):
        sf.load("run/best.ckpt")
    with pytest.raises(ConfigError, match="its dataset is 'my_code:shapes'"):
        sf.load("run/best.ckpt", model="my_code:small")
    net = sf.load("run/best.ckpt", model="my_code:small", dataset="my_code:shapes")
    assert net.classes == ("up", "down", "left")
    assert net(torch.zeros(2, 1, 6, 4, dtype=torch.uint8)).shape == (2, 3)
    with pytest.raises(DataError, match="images of my_code:shapes are not square"):
        net.read("a.png")
    with pytest.raises(ConfigError, match=r"do not fit the model my_code:Small: it is another mod"):
        sf.load("run/best.ckpt", model="my_code:Small")


def test_resuming_needs_the_names_again(
    here: Path, spikefuse: Spikefuse, capsys: pytest.CaptureFixture[str]
) -> None:
    assert spikefuse(*TRAIN, *OWN, "--out", "run") == 0
    forget(["my_code"])
    resume = "train", "--resume", "run/last.ckpt", "--epochs", "3", "--device", "cpu"
    assert spikefuse(*resume) == 2
    assert "its model is 'my_code:small'" in capsys.readouterr().err
    assert spikefuse(*resume, *OWN) == 0
    assert own.options(TrainConfig(model="my_code:small")) == ["--model", "my_code:small"]
    assert own.options(TrainConfig()) == []


def test_recipes_name_the_users_code(here: Path, spikefuse: Spikefuse) -> None:
    text = (
        "model: my_code:Small\ndataset: my_code:shapes\nepochs: 1\nnum-steps: 2\nbatch-size: 27\n"
    )
    (here / "recipe.yaml").write_text(text)
    assert recipe.read(here / "recipe.yaml")["model"] == "my_code:Small"
    assert spikefuse("train", "--config", "recipe.yaml", "--device", "cpu") == 0


def test_events(here: Path, spikefuse: Spikefuse) -> None:
    events = "--model", "my_code:small", "--dataset", "my_code:events"
    options = "--batch-size", "27", "--epochs", "1", "--device", "cpu"
    assert spikefuse("train", *options, *events, "--out", "run") == 0
    net = sf.load("run/best.ckpt", model="my_code:small", dataset="my_code:events")
    assert net.config.num_steps == 3
    (here / "a.ev").write_bytes(bytes([0, 1, 2, 3, 5, 4, 3, 2, 0, 1, 0, 1]))
    inputs = net.read("a.ev")
    assert inputs.shape == (1, 3, 2, 6, 4)
    assert inputs.sum() == 4
    assert predict.find_files(net, [here]) == [here / "a.ev"]
    with pytest.raises(ConfigError, match="event-mlp reads frames of one bit, but my_code:events"):
        TrainConfig(dataset="my_code:events", model="event-mlp")


WRONG = [
    ("model", "my_code", "unknown model 'my_code': choose one of mlp"),
    ("model", "my_code:", "model is my_code:: expected module:name, such as my_code:small for"),
    ("model", "my_code.py:small", "model is my_code.py:small: expected module:name"),
    ("model", "a/my_code:small", "model is a/my_code:small: expected module:name"),
    ("model", "no_code:f", "model is no_code:f, but {here} and the installed packages have no "),
    ("model", "my_code.nets:f", "model is my_code.nets:f, but {here} and the installed packages"),
    (
        "model",
        "my_code:smal",
        "model is my_code:smal, but {here}/my_code.py has no smal: did you me",
    ),
    (
        "dataset",
        "my_code:zzz",
        "dataset is my_code:zzz, but {here}/my_code.py has no zzz: define it",
    ),
    (
        "model",
        "my_code:NAMES",
        "model is my_code:NAMES, which is an object of type tuple: expected",
    ),
    (
        "model",
        "my_code:network",
        "model is my_code:network, which is an object of type Sequential: e",
    ),
    (
        "model",
        "my_code:short",
        "model is my_code:short, which does not take four arguments (too ma",
    ),
    (
        "dataset",
        "my_code:read",
        "dataset is my_code:read, which is a function: expected a spikefuse",
    ),
    ("dataset", "my_code:no_steps", "dataset is my_code:no_steps, which holds events but has no n"),
    ("dataset", "my_code:no_shape", "dataset is my_code:no_shape, whose shape (6, 4) is not (C, H"),
    (
        "model",
        "my_broken:net",
        "model is my_broken:net, but importing my_broken failed at line 2 of",
    ),
    ("model", "my_needy:net", "model is my_needy:net, but importing my_needy failed at line 1 of "),
]


@pytest.mark.parametrize(("setting", "name", "message"), WRONG)
def test_errors_name_the_module_the_attribute_and_the_fix(
    here: Path, setting: str, name: str, message: str
) -> None:
    (here / "my_broken.py").write_text("x = 1\nraise ValueError('no\\nnet')\n")
    (here / "my_needy.py").write_text("import no_such_package\n")
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**{setting: name})
    assert str(caught.value).startswith(message.format(here=here))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("my_code:wrapped", "my_code:shapes"),
            "the builder my_code:wrapped has returned an object of type T",
        ),
        (
            ("my_code:unflattened", "my_code:shapes"),
            "the model my_code:unflattened has outputs [2, 27, 1, 6, 3]: expected [T, 27, 3], one",
        ),
        (
            ("my_code:lazy", "my_code:shapes"),
            "my_code:lazy has returned a network whose 1 is LazyLinear, without weights before",
        ),
        (("my_code:small", "my_code:one_part"), "has read an object of type Images: expected (tra"),
        (("my_code:small", "my_code:in_tuple"), "has read a tuple of 1 set: expected (training, t"),
        (("my_code:small", "my_code:pairs"), "has read an object of type tuple: expected (trai"),
        (
            ("my_code:small", "my_code:wrong_shape"),
            "has read training torch.uint8 [N, 1, 6, 4]: expected torch.uint8 [N, 1, 4, 6]",
        ),
        (
            ("my_code:small", "my_code:wrong_labels"),
            "has read training labels from 0 to 2: expected 0 to 1, for its 2 classes",
        ),
    ],
)
def test_what_users_code_returns_is_checked(
    here: Path,
    spikefuse: Spikefuse,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, str],
    message: str,
) -> None:
    model, dataset = arguments
    assert spikefuse(*TRAIN, "--model", model, "--dataset", dataset) == 2
    error = capsys.readouterr().err
    assert error.startswith("spikefuse train: error: ")
    assert message in error
    assert not list(here.glob("runs/*"))


@pytest.mark.parametrize(
    ("option", "value"), [("neuron", "plif"), ("decay", "0"), ("threshold", "0.3")]
)
def test_a_builder_that_ignores_its_neuron_takes_no_options_of_it(
    here: Path, spikefuse: Spikefuse, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    names = "--model", "my_code:fixed", "--dataset", "my_code:shapes"
    assert spikefuse(*TRAIN, *names, f"--{option}", value) == 2
    message = f"--{option} is given, but my_code:fixed does not call its argument neuron: call it"
    assert message in capsys.readouterr().err


def test_a_builder_with_neurons_of_its_own(
    here: Path, spikefuse: Spikefuse, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, shown in ("fixed", "my_code:fixed: "), ("small", "my_code:small with lif neurons: "):
        model = "--model", f"my_code:{name}"
        assert spikefuse(*TRAIN, *model, "--dataset", "my_code:shapes", "--epochs", "1") == 0
        assert f"\n{shown}" in capsys.readouterr().out


def test_a_module_that_is_imported_anew(here: Path) -> None:
    sys.path.insert(0, str(here))
    for size in (3, 50):  # of other lengths, as bytecode of one second is told apart by them
        code = f"import torch.nn as nn\ndef net(*_):\n    return nn.Linear(4, {size})\n"
        (here / "my_broken.py").write_text(code)
        sys.modules.pop("my_broken", None)
        importlib.invalidate_caches()
        own.register("model", "my_broken:net")
        assert MODELS["my_broken:net"]().out_features == size
        module = sys.modules["my_broken"]
        assert from_python._registered(module.net) == "my_broken:net"
    own_function = lambda *_: None  # noqa: E731
    own_function.__module__, own_function.__qualname__ = "my_broken", "net"
    with pytest.warns(UserWarning, match="my_broken:net now is another function than"):
        from_python._registered(own_function)
    own.register("model", "my_broken:net")
    assert MODELS["my_broken:net"] is own_function


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_of_series_are_finite(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    monkeypatch.setattr(own, "ROWS", 2)
    waves = Dataset((1,), ("a", "b"), lambda *_: (), "series", {"num_steps": 4})
    monkeypatch.setitem(DATASETS, "waves", waves)
    config = TrainConfig(dataset="waves", model="mlp")
    train, test = (Series(torch.ones(5, 4, 1), torch.arange(5) % 2) for _ in range(2))
    own.check_examples(config, (train, test))
    test.pixels[4, 3, 0] = value
    with pytest.raises(DataError, match=r"read test values from .*: expected finite ones"):
        own.check_examples(config, (train, test))


@pytest.mark.parametrize("kind", ["events", "series"])
def test_a_read_that_ignores_the_number_of_steps(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def part(num_steps: int) -> Frames | Series:
        labels = torch.arange(4) % 2
        if kind == "series":
            return Series(torch.ones(4, num_steps, 3), labels)
        return Frames(torch.ones(4, num_steps, 3, dtype=torch.uint8), labels, (3,), 8)

    waves = Dataset((3,), ("a", "b"), lambda *_, **__: (), kind, {"num_steps": 10})
    monkeypatch.setitem(DATASETS, "waves", waves)
    config = TrainConfig(dataset="waves", model="mlp", num_steps=5)
    own.check_examples(config, (part(5), part(5)))
    with pytest.raises(DataError, match=r"read test .* \[N, 10, 3\]: expected .* \[N, 5, 3\]$"):
        own.check_examples(config, (part(5), part(10)))


@pytest.mark.parametrize(
    ("task", "label", "message"),
    [
        ("sequence", -1, "labels from -1 to 1: expected 0 to 1, .* or -100 for steps that do not "),
        ("sequence", -100, "labels of class -100 only: add others"),
        ("classification", -100, "labels from -100 to 1: .* classes; leave out examples without a"),
    ],
)
def test_classes_that_are_none(
    monkeypatch: pytest.MonkeyPatch, task: str, label: int, message: str
) -> None:
    waves = Dataset((1,), ("a", "b"), lambda *_: (), "series", {"num_steps": 4})
    monkeypatch.setitem(DATASETS, "waves", waves)
    config = TrainConfig(dataset="waves", model="mlp", task=task, criterion="cross-entropy")
    labels = torch.arange(6) % 2 if task == "classification" else torch.full((6, 4), label)
    if label != -100 or task == "classification":
        labels[0], labels[1] = label, 1
    part = Series(torch.ones(6, 4, 1), labels)
    with pytest.raises(DataError, match=message):
        own.check_examples(config, (part, part))


def test_series_that_are_described_by_their_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(directory: Path, **options: int) -> Dataset:
        part = Series(torch.ones(5, options["num_steps"], 2), torch.ones(5, 1))
        return Dataset((2,), ("speed",), lambda *_, **__: (part, part), "series", options)

    options = {"num_steps": 4}
    logs = Dataset((1,), (), lambda *_: (), "series", options, describe=describe)
    monkeypatch.setitem(DATASETS, "logs", logs)
    config = TrainConfig(dataset="logs", model="mlp", task="regression", num_steps=3)
    config, parts = load_examples(config, ".", False)
    own.check_examples(config, parts)
    assert (config.classes, config.shape, config.num_steps) == (("speed",), (2,), 3)
    assert TrainConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match="logs has one class: add another"):
        replace(config, task="classification", criterion="cross-entropy")


def test_a_users_data_error_is_one_line(
    here: Path, spikefuse: Spikefuse, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "missing").touch()
    assert spikefuse(*TRAIN, *OWN, "--data-dir", here) == 2
    error = capsys.readouterr().err
    assert error == f"spikefuse train: error: {here} has no bars: draw some\n"


def test_entry_points_of_installed_packages(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = here / "my_package-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    points = "[spikefuse.models]\nmy-net = my_code:small\n"
    points += "[spikefuse.datasets]\nmy-shapes = my_code:shapes\n"
    (installed / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(here))
    try:
        config = TrainConfig.from_dict({"model": "my-net", "dataset": "my-shapes"})
        assert config.make_network()(torch.zeros(2, 1, 1, 6, 4)).shape == (2, 1, 3)
    finally:
        for setting, name in (("model", "my-net"), ("dataset", "my-shapes")):
            own.REGISTRIES[setting].pop(name, None)
    with pytest.raises(ConfigError, match="unknown model 'my-other-net'"):
        TrainConfig(model="my-other-net")
