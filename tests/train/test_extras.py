"""Options of a run that Lightning's callbacks and loggers implement, and the rate penalty."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import spikefuse as sf
from spikefuse import data
from spikefuse.train import ConfigError, TrainConfig, TrainingModule
from spikefuse.train.data_module import VALIDATION_FRACTION, VALIDATION_SEED
from spikefuse.train.extras import LOGGERS, make_logger

Spikefuse = Callable[..., int]
MLP = ["--model", "mlp", "--lr", "0.01"]


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def checkpoint(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def test_early_stopping(
    spikefuse: Spikefuse, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    still = [*small, "--model", "mlp", "--lr", "1e-30", "--patience", "2", "--epochs", "9"]
    assert spikefuse("train", *still, "--out", "run") == 0
    rows = table(tmp_path / "run" / "metrics.csv")
    assert 3 <= len(rows) < 9
    best = max(float(row["val_accuracy"]) for row in rows)
    assert max(float(row["val_accuracy"]) for row in rows[:-2]) == best
    out = capsys.readouterr().out
    assert (
        f"stopped after epoch {len(rows)}: no higher validation accuracy with --patience 2" in out
    )
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["validation_accuracy"] == best
    # Resumed, as after an interruption of the test, it ends where it had ended.
    before = checkpoint(tmp_path / "run" / "last.ckpt")["spikefuse"]["history"]
    assert spikefuse("train", "--resume", "run/last.ckpt", "--device", "cpu") == 0
    assert checkpoint(tmp_path / "run" / "last.ckpt")["spikefuse"]["history"] == before
    assert f"stopped after epoch {len(rows)}: " in capsys.readouterr().out
    again = json.loads((tmp_path / "run" / "result.json").read_text())
    assert again["test_accuracy"] == result["test_accuracy"]


def test_moving_average_of_the_weights(
    spikefuse: Spikefuse, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The average is evaluated and saved; a resumed run continues both kinds of weights."""
    options = [*small, *MLP, "--ema", "0.5"]
    assert spikefuse("train", *options, "--epochs", "3", "--out", "a") == 0
    assert spikefuse("train", *options, "--epochs", "2", "--out", "b") == 0
    resume = "--resume", "b/last.ckpt", "--epochs", "3", "--device", "cpu"
    assert spikefuse("train", *resume) == 0
    straight, resumed = (checkpoint(tmp_path / run / "last.ckpt") for run in "ab")
    name = "net.net.1.weight"
    for key in ("state_dict", "current_model_state"):
        assert torch.equal(straight[key][name], resumed[key][name])
    average, current = straight["state_dict"][name], straight["current_model_state"][name]
    assert not torch.equal(average, current)
    assert torch.allclose(average, current, atol=0.1)
    capsys.readouterr()
    assert spikefuse("eval", "a/best.ckpt", "--device", "cpu") == 0
    accuracy = json.loads((tmp_path / "a" / "result.json").read_text())["test_accuracy"]
    assert f"test accuracy {100 * accuracy:.2f} %" in capsys.readouterr().out
    best = checkpoint(tmp_path / "a" / "best.ckpt")
    net = sf.load(tmp_path / "a" / "best.ckpt")
    assert torch.equal(net.net.net[1].weight, best["state_dict"][name])


def test_rates_are_those_of_the_averaged_weights(
    spikefuse: Spikefuse, tmp_path: Path, small: list[str]
) -> None:
    """On examples from the whole validation set, which are in the order of their classes."""
    options = [*small, *MLP, "--ema", "0.99", "--lr", "0.05", "--epochs", "1", "--out", "a"]
    assert spikefuse("train", *options) == 0
    rest, _ = data.load("digits")
    _, validation = data.split(rest, VALIDATION_FRACTION, VALIDATION_SEED)
    rows = np.linspace(0, len(validation) - 1, 32).round()
    net = sf.load(tmp_path / "a" / "last.ckpt")
    with torch.no_grad(), sf.record(net.net.net) as record:
        net(validation[torch.from_numpy(rows).long()].pixels)
    with (tmp_path / "a" / "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    found = {name: float(row[f"rate_{name}"]) for name in record.rates}
    assert found == pytest.approx(record.rates)


def penalized(module: TrainingModule, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss and the penalty of the most recent call of the network."""
    loss, penalty = module.loss(outputs, labels), module._penalty()
    return loss if penalty is None else loss + penalty


def test_rate_penalty_adds_the_mean_rate_and_lowers_it() -> None:
    torch.manual_seed(0)
    images, labels = torch.randint(256, (64, 1, 8, 8), dtype=torch.uint8), torch.arange(64) % 10
    rates = []
    for weight in (0.0, 5.0):
        config = TrainConfig(num_steps=4, rate_penalty=weight, shift=0, lr=0.01)
        module = TrainingModule(config)
        optimizer = module.configure_optimizers()
        for _ in range(15):
            optimizer.zero_grad()
            outputs = module.net(module.encode(images))
            penalized(module, outputs, labels).backward()
            optimizer.step()
        assert module.net.fusion.fused  # neurons with hooks are fused as others
        counted = layer_rates(module, images)
        rates.append(sum(counted) / len(counted))
        if weight:
            outputs = module.net(module.encode(images))
            expected = module.loss(outputs, labels) + weight * rates[-1]
            value = penalized(module, outputs, labels)
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=0)
            assert not module._rates.last
    assert rates[1] < 0.7 * rates[0]


def test_rate_penalty_without_neurons() -> None:
    class Dense(TrainingModule):
        def make_network(self) -> sf.Temporal:
            return sf.Temporal(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)))

    with pytest.raises(ConfigError, match="rate_penalty is given, but conv has no neurons"):
        Dense(TrainConfig(rate_penalty=0.1))


def test_rate_penalty_of_recurrent_layers() -> None:
    torch.manual_seed(0)
    config = TrainConfig(model="recurrent", num_steps=4, rate_penalty=2.0, shift=0)
    module, rates = TrainingModule(config), []
    for layer in module.net.modules():
        if isinstance(layer, sf.Recurrent):
            layer.register_forward_hook(lambda m, x, y: rates.append(y.mean().item()))
    labels = torch.arange(64) % 10
    x = module.encode(torch.randint(256, (64, 1, 8, 8), dtype=torch.uint8))
    outputs = module.net(x)
    assert len(rates) == 2
    assert max(rates) > 0.01
    expected = module.loss(outputs, labels) + 2.0 * sum(rates) / 2
    torch.testing.assert_close(penalized(module, outputs, labels), expected)


def layer_rates(module: TrainingModule, images: torch.Tensor) -> list[float]:
    """The rate of each layer, counted by hooks of the test's own."""
    counted: list[float] = []
    neurons = [m for m in module.net.modules() if isinstance(m, sf.Neuron)]
    handles = [
        neuron.register_forward_hook(lambda m, x, y: counted.append(y.float().mean().item()))
        for neuron in neurons
    ]
    with torch.no_grad():
        module.net(module.encode(images))
    for handle in handles:
        handle.remove()
    assert len(counted) == len(neurons) > 1
    return counted


def test_loggers(spikefuse: Spikefuse, tmp_path: Path, small: list[str]) -> None:
    (tmp_path / "my_logs.py").write_text(
        "from lightning.pytorch.loggers import CSVLogger\n"
        "def logger(folder):\n    return CSVLogger(folder, name='mine', version='')\n"
    )
    for name, folder in (("csv", "lightning_logs/version_0"), ("my_logs:logger", "mine")):
        out = name.partition(":")[0]
        assert spikefuse("train", *small, *MLP, "--out", out, "--logger", name) == 0
        written = tmp_path / out / folder
        rows, own = table(written / "metrics.csv"), table(tmp_path / out / "metrics.csv")
        assert len(own) == 2
        rate = next(key for key in own[0] if key.startswith("rate_"))
        for key in ("val_accuracy", "train_loss", "lr", rate):
            logged = [float(row[key]) for row in rows if row[key]]
            assert logged == pytest.approx([float(row[key]) for row in own])
        assert [row["step"] for row in rows if row["step_loss"]] == ["10", "20"]
        assert "model: mlp" in (written / "hparams.yaml").read_text()


def test_loggers_that_cannot_be_made(
    tmp_path: Path,
    spikefuse: Spikefuse,
    small: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(save_dir: str) -> None:
        raise ModuleNotFoundError("mlflow is not\ninstalled")

    assert {"csv", "tensorboard", "wandb", "mlflow", "comet"} <= LOGGERS.keys()
    with pytest.raises(ConfigError, match="unknown logger 'wandbb': did you mean wandb"):
        make_logger("wandbb", tmp_path, TrainConfig())
    with pytest.raises(
        ConfigError, match="logger is pathlib:Path, which has returned a PosixPath: ex"
    ):
        make_logger("pathlib:Path", tmp_path, TrainConfig())
    monkeypatch.setitem(LOGGERS, "mlflow", missing)
    with pytest.raises(ConfigError, match=r"logger is mlflow, .* \(mlflow is not installed\)"):
        make_logger("mlflow", tmp_path, TrainConfig())
    assert spikefuse("train", *small, "--logger", "wandbb") == 2
    assert "unknown logger 'wandbb'" in capsys.readouterr().err
    assert not list(tmp_path.glob("runs/*"))


def test_checkpoints_of_earlier_versions_decayed_all_parameters(tmp_path: Path) -> None:
    from spikefuse.train.checkpoint import KEY, load

    module = TrainingModule(TrainConfig(model="mlp", weight_decay=0.1))
    config = module.config.to_dict()
    del config["decay_all"]
    content = {KEY: {"config": config, "history": []}, "state_dict": module.state_dict()}
    torch.save(content, tmp_path / "old.ckpt")
    assert load(tmp_path / "old.ckpt").config.decay_all
