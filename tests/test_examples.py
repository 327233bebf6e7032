"""The programs in examples/ run, and do what they say."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from spikefuse.train import ConfigError, TrainConfig, from_python, plots
from tests.processes import finish, torchrun

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def program(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def recordable() -> Iterator[None]:
    """Of an optimizer's settings only the learning rate changes; see `spikefuse.graph_step`."""
    found: set[str] = set()

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        groups = optimizer.param_groups
        found.add(repr([{k: v for k, v in g.items() if k not in ("params", "lr")} for g in groups]))

    handle = register_optimizer_step_pre_hook(note)
    yield
    handle.remove()
    assert len(found) == 1


@pytest.mark.filterwarnings("ignore:.*log_every_n_steps")
def test_own_network(tmp_path: Path, recordable: None) -> None:
    metrics = program("own_network").main(epochs=3, folder=str(tmp_path))
    assert metrics["test_accuracy"] > 0.5
    assert list(tmp_path.glob("**/metrics.csv")) or list(tmp_path.glob("**/events*"))


def test_plain_pytorch(tmp_path: Path, recordable: None) -> None:
    example, checkpoint = program("plain_pytorch"), tmp_path / "digits.pt"
    assert example.main(epochs=2, checkpoint=str(checkpoint)) > 0.8
    example.make_network().load_state_dict(torch.load(checkpoint))


def test_spoken_digits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On generated data, since no folder has the recordings."""
    monkeypatch.setenv("SPIKEFUSE_DATA", str(tmp_path))
    example = program("spoken_digits")
    example.NUM_STEPS, example.NUM_CLASSES = 20, 4
    assert example.main(epochs=6, width=64, num_generated=800) > 0.5
    assert "Using generated data." in capsys.readouterr().out


def test_own_neuron() -> None:
    resonators, leaky = program("own_neuron").main(steps=60)
    assert resonators > leaky + 0.2


def test_event_camera() -> None:
    assert program("event_camera").main(epochs=4) > 0.7


def test_online_adaptation() -> None:
    trained, drifted, adapted = program("online_adaptation").main(steps=40, adaptation=400)
    assert trained < 0.4
    assert drifted > 0.7
    assert adapted < 0.6


def test_event_segmentation() -> None:
    example = program("event_segmentation")
    example.SIZE, example.NUM_STEPS = 24, 8
    background, disc, square = example.main(steps=40, width=8, batch=8)
    assert background > 0.6
    assert (disc + square) / 2 > 0.2  # each covers a tenth of the image


def test_cart_pole() -> None:
    first, last = program("cart_pole").main(updates=12, count=32)
    assert first < 35
    assert last > 1.5 * first


def test_streaming() -> None:
    right, mean_steps = program("streaming").main(steps=100, sure=0.9, count=50)
    assert right > 0.7
    assert mean_steps < 45


def test_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep that ends in its third run, and in the middle of another, is finished later."""
    example, started = program("sweep"), []
    example.COMMON |= {"model": "mlp", "num_steps": 2, "batch_size": 256}
    example.LEARNING_RATES, example.DECAYS = (1e-5, 1e-2), (0.25, 0.5)
    train = from_python.run.train

    def counted(config: TrainConfig, *arguments: Any) -> Any:
        started.append((config.lr, config.decay))
        if len(started) == 3:
            raise KeyboardInterrupt
        return train(config, *arguments)

    monkeypatch.setattr(from_python.run, "train", counted)
    monkeypatch.setattr(plots, "_save", lambda figure, path: path.touch())  # drawing takes longer
    pairs = [(1e-5, 0.25), (1e-5, 0.5), (1e-2, 0.25), (1e-2, 0.5)]
    with pytest.raises(KeyboardInterrupt):
        example.main(str(tmp_path), epochs=2)
    assert started == pairs[:3]
    (tmp_path / "lr-1e-05-decay-0.5" / "result.json").unlink()
    rows = example.main(str(tmp_path), epochs=2)
    assert started[3:] == pairs[1:]
    assert [row["lr"] for row in rows] == [1e-2, 1e-2, 1e-5, 1e-5]
    with (tmp_path / "results.csv").open(newline="") as file:
        table = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
    assert table == rows
    result = json.loads((tmp_path / "lr-1e-05-decay-0.5" / "result.json").read_text())
    assert result["resumed"]
    assert len(started) == 6
    example.main(str(tmp_path), epochs=3)
    assert started[6:] == pairs
    for folder in tmp_path.glob("lr-*"):
        assert json.loads((folder / "result.json").read_text())["config"]["epochs"] == 3
    with pytest.raises(ConfigError, match=r"epochs is 2: .* has done 3 already"):
        example.main(str(tmp_path), epochs=2)
    assert all(
        1e-5 <= row["lr"] <= 1e-2 and 0.25 <= row["decay"] <= 0.5 for row in example.drawn(9)
    )


def test_stdp_digits(tmp_path: Path) -> None:
    plot = tmp_path / "fields.png"
    assert program("stdp_digits").main(neurons=40, epochs=1, num_steps=20, plot=str(plot)) > 0.5
    assert plot.stat().st_size > 1000


def test_several_gpus() -> None:
    output = finish(torchrun(2, EXAMPLES / "several_gpus.py", "--epochs", "1"))
    (accuracy,) = re.findall(r"accuracy (\S+) with 2 processes", output)
    assert float(accuracy) > 0.3


def test_every_program_is_tested() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= tested
    assert all(path.read_text().count("\n") <= 120 for path in EXAMPLES.glob("*.py"))
