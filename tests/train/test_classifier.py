"""The Lightning module: event frames, augmentation, memory formats, scaled gradients."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from spikefuse.data import DATASETS, Dataset, Frames
from spikefuse.data.frames import pack
from spikefuse.train import run
from spikefuse.train.classifier import Classifier
from spikefuse.train.config import TrainConfig

Spikefuse = Callable[..., int]
SHAPES = {"nmnist": (2, 8, 8), "shd": (30,)}


def frames(num: int, num_steps: int, shape: tuple[int, ...], seed: int) -> Frames:
    """Samples of ten classes; in each class another tenth of the sites is active."""
    rng = np.random.default_rng(seed)
    labels, sites = np.arange(num) % 10, np.arange(np.prod(shape))
    rates = 0.1 + (sites % 10 == labels[:, None])
    counts = rng.poisson(rates[:, None], (num, num_steps, len(sites)))
    packed = pack(counts.clip(max=15).astype(np.uint8), 4)
    return Frames(torch.from_numpy(packed), torch.from_numpy(labels), shape, 4)


@pytest.fixture(params=SHAPES)
def events(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an event dataset, replaced by a small one of the same kind."""
    name, shape = request.param, SHAPES[request.param]

    def read(directory: Path, download: bool, **options: Any) -> tuple[Frames, Frames]:
        assert options["num_steps"] == 5
        return frames(200, 5, shape, 0), frames(40, 5, shape, 1)

    transform = DATASETS[name].transform
    small = Dataset(shape, tuple("0123456789"), read, "events", transform)
    monkeypatch.setitem(DATASETS, name, small)
    return name


def test_a_run_on_event_data(spikefuse: Spikefuse, tmp_path: Path, events: str) -> None:
    options = "--model mlp -T 5 --epochs 8 --batch-size 20 --device cpu --lr 0.01"
    assert (
        spikefuse(
            "train", "--dataset", events, *shlex.split(options), "--shift", "0", "--out", "run"
        )
        == 0
    )
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["test_accuracy"] > 0.9
    assert (tmp_path / "run" / "raster.png").exists()


def test_event_frames_are_only_transposed() -> None:
    module = Classifier(TrainConfig(dataset="nmnist", num_steps=5))
    counts = torch.randint(0, 256, (3, 5, 2, 34, 34), dtype=torch.uint8)
    x = module.encode(counts)
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    assert torch.equal(x, counts.transpose(0, 1).float())


def test_frames_of_one_sample_are_augmented_alike() -> None:
    module = Classifier(TrainConfig(dataset="nmnist", num_steps=5, shift=3, flip=True))
    still = torch.randint(0, 256, (8, 1, 2, 34, 34), dtype=torch.uint8).expand(8, 5, 2, 34, 34)
    moved = module.augment(still)
    assert not torch.equal(moved, still)
    assert torch.equal(moved, moved[:, :1].expand_as(moved))


def test_half_of_the_images_are_mirrored() -> None:
    module = Classifier(TrainConfig(shift=0, flip=True))
    images = torch.randint(0, 256, (300, 1, 8, 8), dtype=torch.uint8)
    moved = module.augment(images)
    mirrored = (moved == images.flip(-1)).flatten(1).all(1)
    still = (moved == images).flatten(1).all(1)
    assert (mirrored ^ still).all()
    assert 100 < mirrored.sum() < 200


def test_channels_last_agrees_to_rounding(
    spikefuse: Spikefuse, tmp_path: Path, small: list[str]
) -> None:
    curves = []
    for flag in ("--channels-last", "--no-channels-last"):
        assert spikefuse("train", *small, "--epochs", "1", flag, "--out", flag[2:]) == 0
        checkpoint = torch.load(tmp_path / flag[2:] / "last.ckpt")
        (row,) = checkpoint["spikefuse"]["history"]
        curves.append((row["train_loss"], row["val_loss"]))
        weight = checkpoint["state_dict"]["net.net.4.weight"]
        assert weight.is_contiguous(memory_format=torch.channels_last) == (flag[2] == "c")
    assert curves[0] == pytest.approx(curves[1], rel=1e-3)


def test_float16_scales_the_loss_and_clips_unscaled_gradients(
    spikefuse: Spikefuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: list[str]
) -> None:
    """On a CPU, where the command rejects float16 but PyTorch supports it."""
    norms = []
    hook = Classifier.on_before_optimizer_step

    def watched(self: Classifier, optimizer: torch.optim.Optimizer) -> None:
        hook(self, optimizer)
        gradients = [p.grad.flatten() for p in self.parameters()]
        norms.append(float(torch.cat(gradients).norm()))

    make_trainer = run._trainer

    def scaling_trainer(*arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setitem(run.LIGHTNING_PRECISION, "16", "32-true")
            trainer = make_trainer(*arguments)
        trainer.strategy.precision_plugin = MixedPrecision("16-mixed", "cpu")
        return trainer

    monkeypatch.setattr(run, "_device", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(run, "_trainer", scaling_trainer)
    monkeypatch.setattr(Classifier, "on_before_optimizer_step", watched)
    options = shlex.split("--model mlp --precision 16 --clip 0.01 --epochs 1 --out run")
    assert spikefuse("train", *small, *options) == 0
    finite = [norm for norm in norms if np.isfinite(norm)]
    assert len(norms) == 10
    assert len(finite) > 5
    assert finite == pytest.approx([0.01] * len(finite), rel=1e-2)
    checkpoint = torch.load(tmp_path / "run" / "last.ckpt")
    assert checkpoint["MixedPrecision"]["scale"] > 1
    (row,) = checkpoint["spikefuse"]["history"]
    assert 0 < row["train_loss"] < 3


def test_data_wait_excludes_the_training_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    module = Classifier(TrainConfig())
    batch = torch.empty(0), torch.empty(0)
    for wait, step in ((3.0, 5.0), (2.0, 5.0), (2.0, 6.0)):  # the first wait precedes the clock
        now += wait
        module.on_train_batch_start(batch, 0)
        now += step
        module.on_train_batch_end()
    assert module.data_wait() == 4.0 / 20.0
