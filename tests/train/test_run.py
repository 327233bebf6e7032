"""Whole runs: their files, that they learn, and the evaluation of their checkpoints.

Runs of several processes that share data and time match one process.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

import matplotlib.image
import pytest
import torch
from PIL import Image

from spikefuse.train import predict, run
from spikefuse.train.callbacks import silent_layers
from spikefuse.train.config import RunOptions, TrainConfig
from spikefuse.train.fields import ConfigError
from spikefuse.train.processes import Processes
from spikefuse.train.training_module import TrainingModule
from tests.train.runs import OPTIONS, assert_same_curve, rows, with_others

Spikefuse = Callable[..., int]
SHARED = (*OPTIONS, "--time-ranks", "2")


@pytest.mark.usefixtures("drawn")
def test_a_run_and_its_evaluation(
    spikefuse: Spikefuse, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert spikefuse("train", *small, "--fuse", "--batch-size", "32", "--epochs", "8") == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    directory = tmp_path / "runs" / "digits-conv-1"
    assert sorted(p.name for p in directory.iterdir()) == [
        *("best.ckpt", "curves.png", "last.ckpt", "metrics.csv", "raster.png", "result.json"),
        "tensorboard",
    ]
    assert len(list((directory / "tensorboard").glob("events.*"))) == 1
    for picture in ("curves.png", "raster.png"):
        assert matplotlib.image.imread(directory / picture).std() > 0.01

    result = json.loads((directory / "result.json").read_text())
    assert result["test_accuracy"] >= 0.9
    assert result["test_images"] == 359
    config = TrainConfig.from_dict(result["config"])
    assert config == TrainConfig(batch_size=32, num_steps=2, epochs=8)
    with (directory / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) for row in rows] == list(range(1, 9))
    assert all(0 < float(row["rate_2"]) < 1 > float(row["silent_2"]) for row in rows)
    assert {float(row["lr"]) for row in rows} == {0.001}
    best = max(rows, key=lambda row: (float(row["val_accuracy"]), -float(row["val_loss"])))
    assert int(best["epoch"]) == result["best_epoch"]
    assert "\n2 of 2 batch norms fused with the neuron after them\n" in output
    assert len(re.findall(r"^epoch \d/8 .* img/s$", output, re.M)) == 8
    percent = f"{100 * result['test_accuracy']:.2f} %"
    assert f"test accuracy {percent} on 359 test samples" in output

    assert spikefuse("eval", directory / "best.ckpt", "--device", "cpu") == 0
    loss = f"{result['test_loss']:.4f}"
    assert capsys.readouterr().out == f"test accuracy {percent}, loss {loss} (digits)\n"


@pytest.mark.parametrize("options", ["--neuron brf", "--threshold 1e3", "--threshold 0.3"])
def test_layers_that_never_fire_are_said_once(
    spikefuse: Spikefuse, small: list[str], capsys: pytest.CaptureFixture[str], options: str
) -> None:
    assert spikefuse("train", *small, "--model", "mlp", *options.split()) == 0
    output = capsys.readouterr().out
    found = re.findall(r"^  warning: layers without any spike: (.*); unless", output, re.M)
    assert found == ([] if "0.3" in options else ["3, 6"])
    row = {"activity_0": 0.0, "activity_1": 0.1, "silent_net.2": 1.0, "val_loss": 0.0}
    assert silent_layers(row) == ["0", "net.2"]


@pytest.mark.parametrize(
    ("dataset", "names", "said"),
    [("folder", "abcdef", "a, b, c, d, e, ..."), ("events --sensor 6x6", "ab", "a, b")],
)
def test_a_run_names_the_classes_of_folders(
    spikefuse: Spikefuse,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    dataset: str,
    names: str,
    said: str,
) -> None:
    monkeypatch.setenv("SPIKEFUSE_CACHE_DIR", str(tmp_path / "cache"))
    for name in names:
        (tmp_path / "own" / name).mkdir(parents=True)
        for i in range(10):
            path = tmp_path / "own" / name / str(i)
            if dataset == "folder":
                Image.new("L", (6, 6)).save(path.with_suffix(".png"))
            else:
                path.with_suffix(".csv").write_text("x,y,p,t\n1,1,1,0\n")
    options = f"--dataset {dataset} --data-dir own --model mlp -T 2 --epochs 1 --batch-size 8"
    assert spikefuse("train", *options.split(), "--device", "cpu", "--no-fuse") == 0
    first = f"{dataset.split()[0]}: {len(names)} classes ({said}), {7 * len(names)} training, "
    assert capsys.readouterr().out.splitlines()[1].startswith(first)


def test_a_run_with_fusion_and_without(
    spikefuse: Spikefuse, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights agree to rounding, and checkpoints resume with the other setting."""
    options = [*small, "--model", "mlp", "--epochs", "1"]
    weights = []
    for out, flag in (("a", "--fuse"), ("b", "--no-fuse")):
        assert spikefuse("train", *options, "--out", out, flag) == 0
        assert ("batch norms fused" in capsys.readouterr().out) == (flag == "--fuse")
        weights.append(torch.load(tmp_path / out / "last.ckpt", weights_only=True)["state_dict"])
    assert [*weights[0]] == [*weights[1]]
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-2, atol=1e-3)
    for out, flag in (("a", "--no-fuse"), ("b", "--fuse")):
        assert spikefuse("eval", f"{out}/best.ckpt", "--device", "cpu", flag) == 0
        resume = ["--resume", f"{out}/last.ckpt", "--epochs", "2", "--device", "cpu", flag]
        assert spikefuse("train", *resume) == 0
        assert ("batch norms fused" in capsys.readouterr().out) == (flag == "--fuse")
        result = json.loads((tmp_path / out / "result.json").read_text())
        assert result["config"]["fuse"] == (flag == "--fuse")


def test_one_memory_policy_then_another(
    spikefuse: Spikefuse, tmp_path: Path, small: list[str]
) -> None:
    """Whole runs, including plots and test."""

    def memory() -> object:
        return json.loads((tmp_path / "r" / "result.json").read_text())["config"]["memory"]

    options = [*small, "--model", "mlp", "--epochs", "1", "--memory", "bits"]
    assert spikefuse("train", *options, "--out", "r") == 0
    assert memory() == "bits"
    resume = ["--resume", "r/last.ckpt", "--epochs", "2", "--device", "cpu"]
    assert spikefuse("train", *resume, "--memory", "checkpoint") == 0
    assert memory() == "checkpoint"
    assert spikefuse("eval", "r/best.ckpt", "--device", "cpu", "--no-fuse") == 0


def test_runs_are_numbered_and_never_overwritten(
    spikefuse: Spikefuse, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*small, "--model", "mlp", "--epochs", "1"]
    assert spikefuse("train", *options) == 0
    assert spikefuse("train", *options) == 0
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["digits-mlp-1", "digits-mlp-2"]
    assert spikefuse("train", *options, "--out", "runs/digits-mlp-1") == 2
    assert "runs/digits-mlp-1 exists already: choose a new folder" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert spikefuse("train", *options, "--out", "file/new") == 2
    assert "cannot make the folder file/new" in capsys.readouterr().err


def test_runs_depend_on_the_seed_only(
    spikefuse: Spikefuse, tmp_path: Path, small: list[str]
) -> None:
    options = [*small, "--model", "mlp", "--encoding", "poisson", "--epochs", "1"]
    weights = []
    for out, seed in (("a", "7"), ("b", "7"), ("c", "8")):
        torch.manual_seed(len(weights))
        assert spikefuse("train", *options, "--out", out, "--seed", seed) == 0
        state = torch.load(tmp_path / out / "last.ckpt", weights_only=True)["state_dict"]
        weights.append(torch.cat([w.flatten().double() for w in state.values()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_mixed_precision(spikefuse: Spikefuse, tmp_path: Path, small: list[str]) -> None:
    assert spikefuse("train", *small, "--precision", "bf16", "--epochs", "1", "--out", "r") == 0
    result = json.loads((tmp_path / "r" / "result.json").read_text())
    assert 0 < result["test_loss"] < 3


def test_one_step_of_one_image_is_refused(
    spikefuse: Spikefuse, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert spikefuse("train", "--model", "mlp", "-T", "1", "--batch-size", "1") == 2
    errors = capsys.readouterr().err
    assert "--num-steps and --batch-size are both 1" in errors
    assert errors.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("batch_size", "images"), [(647, "1,295 training"), (142, "143 validation"), (179, "359 test")]
)
def test_one_step_with_a_last_batch_of_one_image(
    spikefuse: Spikefuse,
    small: list[str],
    capsys: pytest.CaptureFixture[str],
    batch_size: int,
    images: str,
) -> None:
    assert int(images.split()[0].replace(",", "")) % batch_size == 1
    options = ["--model", "mlp", "-T", "1", "--batch-size", str(batch_size), "--epochs", "1"]
    assert spikefuse("train", *small, *options) == 0
    assert images in capsys.readouterr().out


@pytest.mark.parametrize("out", [None, "new", "empty"])
def test_a_run_that_fails_early_leaves_nothing(
    spikefuse: Spikefuse,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    small: list[str],
    out: str | None,
) -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError("on purpose")

    monkeypatch.setattr(TrainingModule, "validation_step", fail)  # logs have been opened by then
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArithmeticError, match="on purpose"):
        spikefuse("train", *small, "--model", "mlp", *(["--out", out] if out else []))
    left = {p.name for p in tmp_path.rglob("*")}
    assert left == ({"empty"} if out else {"empty", "runs"})


def test_time_and_data_ranks_match_one_process_and_resume_on_fewer(
    alone: Spikefuse, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Four processes share data and time. Two that share time resume the run, and then one does.

    `test_averaged_weights_and_early_stopping...` has two processes that share data.
    """
    assert alone("train", *OPTIONS, "--epochs", "3", "--out", "one") == 0
    capfd.readouterr()
    command = "train", *SHARED, "--data-ranks", "2", "--epochs", "1", "--out", "four"
    code, output = with_others(alone, tmp_path, *command, count=4)
    output += capfd.readouterr().out
    assert code == 0
    assert output.count("epoch 1/1") == output.count("test accuracy") == 1
    resume = ("train", "--resume", "four/last.ckpt", "--device", "cpu", "--epochs")
    assert with_others(alone, tmp_path, *resume, "2", "--time-ranks", "2")[0] == 0
    assert len(rows(tmp_path / "four")) == 2
    assert alone(*resume, "3") == 0
    assert_same_curve(tmp_path / "one", tmp_path / "four")


def test_checkpointed_training_with_shared_time_learns_as_one(
    alone: Spikefuse, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two processes then share the evaluation of the checkpoint."""
    assert alone("train", *OPTIONS, "--epochs", "2", "--out", "one") == 0
    command = "train", *SHARED, "--epochs", "1", "--memory", "checkpoint", "--out", "two"
    assert with_others(alone, tmp_path, *command)[0] == 0
    assert alone("train", "--resume", "two/last.ckpt", "--device", "cpu", "--epochs", "2") == 0
    assert_same_curve(tmp_path / "one", tmp_path / "two")
    evaluation = "eval", "two/best.ckpt", "--device", "cpu"
    capfd.readouterr()
    assert alone(*evaluation) == 0
    expected = capfd.readouterr().out
    code, output = with_others(alone, tmp_path, *evaluation)
    assert code == 0
    assert output + capfd.readouterr().out == expected


@pytest.mark.parametrize(
    ("config", "place", "count", "message"),
    [
        ({}, {"time_ranks": 2, "data_ranks": 2}, 2, "do not match 2 processes"),
        ({}, {"time_ranks": 3}, 4, "time_ranks 3 and data_ranks unset do not match 4"),
        ({}, {"time_ranks": 0}, 2, "time_ranks is 0: expected a whole number of at least 1"),
        (
            {},
            {"time_ranks": 1, "time_chunks": 2},
            1,
            "time_chunks is given, but time_ranks is 1: set it, or remove time_chunks",
        ),
        ({"num_steps": 3}, {"time_ranks": 4}, 4, "num_steps is 3: expected at least time_ranks"),
        (
            {"tbptt": 2},
            {"time_ranks": 2},
            2,
            "tbptt is given, but needs whole sequences",
        ),
        ({"rate_penalty": 0.1}, {"time_ranks": 2}, 2, "rate_penalty is given, but needs whole seq"),
        (
            {"dataset": "shd", "model": "event-mlp"},
            {"time_ranks": 2},
            2,
            "time_ranks is given, but the model computes on events: remove it",
        ),
        (
            {"dataset": "shd", "model": "recurrent"},
            {"time_ranks": 2},
            2,
            "time_ranks is given, but the layers of the model feed back: remove it",
        ),
    ],
)
def test_invalid_parallelism(config: dict, place: dict, count: int, message: str) -> None:
    processes = Processes(0, count, time=max(place["time_ranks"], 1))
    with pytest.raises(ConfigError, match=message):
        run._check_processes(TrainConfig(**config), RunOptions(**place), processes)


@pytest.mark.parametrize(
    ("same", "split"),
    [(["--rate-penalty", "0.1", "--logger", "csv"], []), ([], ["--time-ranks", "2"])],
    ids=["data", "time"],
)
def test_averaged_weights_and_early_stopping_in_several_processes(
    alone: Spikefuse, tmp_path: Path, same: list[str], split: list[str]
) -> None:
    options = *OPTIONS, "--ema", "0.8", "--patience", "9", "--weight-decay", "0.01", *same
    command = "train", *options, "--epochs", "2", "--out"
    assert alone(*command, "one") == 0
    assert with_others(alone, tmp_path, *command, "two", *split)[0] == 0
    assert_same_curve(tmp_path / "one", tmp_path / "two")


def test_a_run_whose_loss_is_not_finite_stops(
    spikefuse: Spikefuse,
    small: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """NaN in a hidden layer makes no spikes, and the loss is finite; in the last one it is NaN."""
    original = TrainingModule.on_train_epoch_start
    for epoch, index, message in (
        (1, 0, "after epoch 2, net.1.weight is not finite: lower the learning rate, clip"),
        (0, -1, "after epoch 1, train_loss is nan and val_loss is nan and net.1.weight is not f"),
    ):

        def breaks(self: TrainingModule, epoch: int = epoch, index: int = index) -> None:
            original(self)
            if self.current_epoch == epoch:
                list(self.net.parameters())[index].data[0] = float("nan")

        monkeypatch.setattr(TrainingModule, "on_train_epoch_start", breaks)
        assert spikefuse("train", *small, "--model", "mlp", "--out", f"run{epoch}") == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    assert not Path("run1/result.json").exists()
    assert "saved" not in line
    assert not Path("run0").exists()


def test_a_run_whose_statistics_are_not_finite_stops(
    spikefuse: Spikefuse, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights and its loss are finite, the squares of its inputs are not."""
    assert spikefuse("train", *small, "--model", "conv", "--lr", "1e30", "--out", "run") == 1
    assert "after epoch 1, net.1.running_var is not finite" in capsys.readouterr().err


def test_a_run_is_named_by_its_folder(
    spikefuse: Spikefuse, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert spikefuse("train", *small, "--model", "mlp", "--out", "run") == 0
    assert spikefuse("eval", "run", "--device", "cpu") == 0
    by_folder = capsys.readouterr().out.splitlines()[-1]
    assert spikefuse("eval", "run/best.ckpt", "--device", "cpu") == 0
    assert capsys.readouterr().out.splitlines() == [by_folder]
    assert predict.load("run").config.model == "mlp"
    assert spikefuse("train", "--resume", "run", "--epochs", "3", "--device", "cpu") == 0
    assert "epoch 3/3" in capsys.readouterr().out


def test_a_folder_whose_name_is_not_utf8(
    spikefuse: Spikefuse, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert spikefuse("train", *small, "--model", "mlp", "--out", "run\udcff") == 2
    assert r"folder 'run\udcff' is not UTF-8, which TensorBoard needs" in capsys.readouterr().err
    assert not list(Path().iterdir())
