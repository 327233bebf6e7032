"""Losses, metrics and predictions of each task, and runs of those that are not classification."""

from __future__ import annotations

import csv
import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import spikefuse as sf
from spikefuse.train import ConfigError, TrainConfig, own
from spikefuse.train.choices import LOSSES
from spikefuse.train.cli import main
from spikefuse.train.tasks import TASKS, Task, Totals
from tests.train.runs import assert_same_run

CODE = Path(__file__).parent / "programs" / "my_code.py"


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_of_classes(smoothing: float) -> None:
    torch.manual_seed(0)
    outputs, labels = torch.randn(5, 3, 7), torch.tensor([6, 0, 2])

    def cross_entropy(logits: torch.Tensor) -> torch.Tensor:
        target = F.one_hot(labels, 7) * (1 - smoothing) + smoothing / 7
        return -(target * logits.log_softmax(1)).sum(1).mean()

    expected = {
        "mean": cross_entropy(outputs.mean(0)),
        "last": cross_entropy(outputs[-1]),
        "every": torch.stack([cross_entropy(y) for y in outputs]).mean(),
    }
    assert set(expected) == set(LOSSES)
    for name, value in expected.items():
        task = Task("classification", "cross-entropy", name, 7, smoothing)
        torch.testing.assert_close(task.loss(outputs, labels), value)


def test_predictions_match_the_loss() -> None:
    outputs = torch.randn(5, 3, 7, dtype=torch.bfloat16)
    for name in ("mean", "every"):
        task = Task("classification", "cross-entropy", name, 7)
        torch.testing.assert_close(task.predict(outputs), outputs.float().mean(0))
    assert torch.equal(Task("regression", "mse", "last", 7).predict(outputs), outputs[-1].float())
    steps = Task("sequence", "mse", "every", 7).predict(outputs)
    assert torch.equal(steps, outputs.float().transpose(0, 1))


# Of an error e, by hand.
DISTANCES = {
    "mse": lambda e: e * e,
    "mae": abs,
    "huber": lambda e: e * e / 2 if abs(e) < 1 else abs(e) - 0.5,
}


@pytest.mark.parametrize("criterion", TASKS["regression"])
def test_losses_of_values(criterion: str) -> None:
    torch.manual_seed(0)
    outputs, one, each = torch.randn(4, 3, 2), torch.randn(3, 2), torch.randn(3, 4, 2)

    def mean(pairs: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> float:
        errors = [e for y, z in pairs for e in (y.double() - z.double()).flatten().tolist()]
        return sum(map(DISTANCES[criterion], errors)) / len(errors)

    by_steps = {
        "mean": [(outputs.double().mean(0), one)],
        "last": [(outputs[-1], one)],
        "every": [(y, one) for y in outputs],
    }
    for steps, pairs in by_steps.items():
        found = Task("regression", criterion, steps, 2).loss(outputs, one)
        assert found.item() == pytest.approx(mean(pairs), rel=1e-5)
    task, pairs = (
        Task("sequence", criterion, "every", 2),
        [*zip(outputs, each.unbind(1), strict=True)],
    )
    assert task.loss(outputs, each).item() == pytest.approx(mean(pairs), rel=1e-5)
    assert task.evaluate(task.predict(outputs), each).item() == pytest.approx(mean(pairs), rel=1e-5)


def test_classes_of_each_step() -> None:
    """Two of five steps are right in one example, and four in the other."""
    labels = torch.tensor([[0, 1, 2, 0, 1], [2, 2, 1, 1, 0]])
    chosen = torch.tensor([[0, 1, 1, 1, 0], [2, 2, 1, 1, 1]])
    logits = 3.0 * F.one_hot(chosen, 3)
    task = Task("sequence", "cross-entropy", "every", 3)
    expected = -logits.log_softmax(-1).gather(-1, labels[..., None]).mean()
    torch.testing.assert_close(task.loss(logits.transpose(0, 1), labels), expected)
    totals = Totals(task)
    totals.add(logits, labels)
    assert totals.mean() == pytest.approx({"loss": expected.item(), "accuracy": 0.6})
    rows = [*task.rows(logits[1], ("a", "b", "c"), 1)]
    p = float(np.exp(3) / (np.exp(3) + 2))
    assert [row[:2] for row in rows] == [(0, "c"), (1, "c"), (2, "b"), (3, "b"), (4, "b")]
    assert [row[2] for row in rows] == pytest.approx([p] * 5)


def test_the_accuracy_counts_the_largest_share() -> None:
    totals = Totals(Task("classification", "cross-entropy", "mean", 3))
    shares = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.4, 0.6], [0.6, 0.4, 0.0]])
    totals.add(torch.eye(3)[[0, 1, 0]], shares, torch.tensor(0.5))
    assert totals.mean() == pytest.approx({"loss": 0.5, "accuracy": 2 / 3})


@pytest.mark.parametrize("name", ["regression", "sequence"])
def test_metrics_of_values(name: str) -> None:
    """Of batches of different sizes, one value far from 0, and one that does not vary."""
    rng = np.random.default_rng(0)
    shape = (7, 4, 3) if name == "sequence" else (7, 3)
    y = rng.normal((0, 1000, 0), (1, 2, 0), shape).astype(np.float32)
    predicted = y + rng.normal(0, 0.3, shape).astype(np.float32)
    task = Task(name, "mse", "every", 3)
    totals = Totals(task)
    for rows in (slice(0, 5), slice(5, 7)):
        totals.add(torch.from_numpy(predicted[rows]), torch.from_numpy(y[rows]))
    values, error = y.reshape(-1, 3).astype(float), (predicted - y).reshape(-1, 3).astype(float)
    r2 = 1 - (error**2).sum(0)[:2] / ((values - values.mean(0))[:, :2] ** 2).sum(0)
    expected = {"loss": (error**2).mean(), "mae": abs(error).mean(), "r2": r2.mean()}
    assert totals.mean() == pytest.approx(expected, rel=1e-4)
    again = Totals(task, totals.sums.tolist(), totals.count)
    assert again.mean() == totals.mean()
    with pytest.raises(RuntimeError):
        Totals(task, [1.0, 2.0], 7)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with my_code.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_code", raising=False)
    shutil.copy(CODE, tmp_path)
    yield tmp_path
    for registry in own.REGISTRIES.values():
        for name in [name for name in registry if name.startswith("my_code:")]:
            del registry[name]
    sys.modules.pop("my_code", None)


OPTIONS = shlex.split("train --model my_code:slow --batch-size 24 --lr 0.01 --device cpu")
RUNS = {
    "rates": ["--task", "regression"],
    "forecast": ["--task", "sequence", "--tbptt", "8", "--accumulate", "2"],
    "signs": ["--task", "sequence", "--criterion", "cross-entropy"],
    "padded": ["--task", "sequence", "--criterion", "cross-entropy", "--tbptt", "5"],
}

OF_CLASSES = "signs", "padded"
LEAST = {"rates": 0.15, "forecast": 0.5, "signs": 0.6, "padded": 0.6}


@pytest.mark.parametrize("name", RUNS)
def test_a_run(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It learns, resumes as if it had not stopped, and is evaluated and used for files."""
    train = [*OPTIONS, *RUNS[name], "--dataset", f"my_code:{name}"]
    metric = "accuracy" if name in OF_CLASSES else "r2"
    epochs = "2" if name == "signs" else "4"
    assert main([*train, "--epochs", epochs, "--out", "run"]) == 0
    history = torch.load("run/last.ckpt", weights_only=True)["spikefuse"]["history"]
    assert history[-1]["val_loss"] < 0.95 * history[0]["val_loss"]
    result = json.loads(Path("run/result.json").read_text())
    assert result[f"test_{metric}"] > LEAST[name]
    assert {"curves.png", "raster.png", "tensorboard"} <= {p.name for p in Path("run").iterdir()}
    with open("run/metrics.csv", newline="") as file:
        assert f"val_{metric}" in next(csv.reader(file))

    if name == "forecast":
        assert main([*train, "--epochs", "2", "--out", "half"]) == 0
        resume = "train", "--resume", "half", "--epochs", "4", "--device", "cpu"
        assert main([*resume]) == 0
        assert_same_run(Path("run"), Path("half"))

    capsys.readouterr()
    assert main(["eval", "run", "--device", "cpu"]) == 0
    value = result[f"test_{metric}"]
    shown = f"R2 {value:.4f}, MAE " if metric == "r2" else f"accuracy {100 * value:.2f} %"
    assert shown in capsys.readouterr().out

    net, (_, test) = sf.load("run"), sf.data.load(own.REGISTRIES["dataset"][f"my_code:{name}"])
    np.save("a.npy", test.pixels[:2].numpy())
    with torch.no_grad():
        expected = net(test.pixels[:2])
        if name in OF_CLASSES:
            is_counted = test.labels != -100
            is_right = net(test.pixels).argmax(-1) == test.labels
            assert value == pytest.approx(is_right[is_counted].double().mean().item())
    assert expected.shape == ((2, 1) if name == "rates" else (2, 20, len(net.classes)))
    assert torch.equal(net.read("a.npy"), test.pixels[:2])
    assert main(["predict", "run", "a.npy", "--csv"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["file"] for row in rows] == [f"a.npy[{i}]" for i in (0, 1) for _ in expected[0]]
    if name in OF_CLASSES:
        labels = [net.classes[i] for i in expected.argmax(-1).flatten().tolist()]
        assert [row["class"] for row in rows] == labels
    else:
        assert {row["name"] for row in rows} == {*net.classes}
        assert [float(row["value"]) for row in rows] == pytest.approx(expected.flatten().tolist())
    assert main(["predict", "run", "a.npy"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(rows)
    assert len({len(line) for line in lines[1:]}) == 1


def test_targets_of_another_task(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*OPTIONS, "--dataset", "my_code:rates"]) == 2
    expected = "my_code:rates has one class: add another, or choose task regression"
    assert expected in capsys.readouterr().err
    for task, other, shape in (("sequence", "rates", "20, 1"), ("regression", "forecast", "1")):
        assert main([*OPTIONS, "--task", task, "--dataset", f"my_code:{other}"]) == 2
        message = f"torch.float32 [240, {shape}], one for each example, or another --task than"
        assert f"{message} {task}" in capsys.readouterr().err
    assert main([*OPTIONS, "--task", "sequence", "--dataset", "my_code:signs"]) == 2
    assert "sequence; for classes, add --criterion cross-entropy\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "regression", "criterion": "cross-entropy"}, "choose mse or mae or huber"),
        ({"criterion": "mse"}, "criterion is mse, but task is classification: choose cross-entr"),
        ({"task": "sequence", "loss": "mean"}, "whose steps all have targets: choose every"),
        ({"task": "regression", "mixup": 0.2}, "mixup is given, but task is regression"),
        ({"task": "sequence", "label_smoothing": 0.1}, "label_smoothing is given, but criterion"),
        ({"task": "segmentation"}, "unknown task 'segmentation'"),
    ],
)
def test_conflicts(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**settings)


def test_defaults() -> None:
    assert (TrainConfig().criterion, TrainConfig().loss) == ("cross-entropy", "mean")
    config = TrainConfig(task="sequence")
    assert (config.criterion, config.loss, config.shift) == ("mse", "every", 0)
    wrong = {**config.to_dict(), "criterion": None}
    assert TrainConfig.from_dict(wrong) == config


@pytest.mark.parametrize("name", ["classification", "regression"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64, torch.float64])
def test_targets_of_other_types(name: str, dtype: torch.dtype) -> None:
    """A user's batches may have those of NumPy; floating-point targets of classes are shares."""
    criterion = "cross-entropy" if name == "classification" else "mse"
    task, outputs = Task(name, criterion, "mean", 3, 0.1), torch.randn(5, 4, 3, requires_grad=True)
    targets = torch.tensor([2, 0, 1, 2])
    if name == "regression" or dtype.is_floating_point:
        targets = F.one_hot(targets, 3)
    usual = torch.int64 if targets.ndim == 1 else torch.float32
    found = []
    for labels in (targets.to(usual), targets.to(dtype)):
        loss, totals = task.loss(outputs, labels), Totals(task)
        totals.add(task.predict(outputs.detach()), labels)
        found.append((loss, *torch.autograd.grad(loss, outputs), totals.mean()))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("steps", [(), (4,)])
def test_ignored_classes_do_not_count(steps: tuple[int, ...]) -> None:
    """As in the cross-entropy, also of a batch without any other class."""
    name = "sequence" if steps else "classification"
    task = Task(name, "cross-entropy", "every" if steps else "mean", 3)
    predictions, targets = torch.randn(12, *steps, 3), torch.randint(3, (12, *steps))
    targets.view(-1)[::3] = -100
    targets[8:] = -100
    totals = Totals(task)
    for part in ([0, 1, 2], [3, 4, 5, 6, 7], [8, 9, 10, 11]):
        totals.add(predictions[part], targets[part])
    counted = targets != -100
    found = totals.mean()
    assert found["accuracy"] == pytest.approx(
        (predictions.argmax(-1) == targets)[counted].double().mean().item()
    )
    expected = F.cross_entropy(predictions[counted].double(), targets[counted])
    assert found["loss"] == pytest.approx(expected.item(), rel=1e-6)
