"""The Lightning module: event frames, augmentation, memory formats, scaled gradients.

The last tests run it, and the data module, in a Lightning trainer of the user's own.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset

import spikefuse as sf
from spikefuse import train
from spikefuse.data import DATASETS, Dataset, Frames
from spikefuse.data.frames import pack
from spikefuse.train import (
    ConfigError,
    DataModule,
    TrainConfig,
    TrainingModule,
    run,
    training_module,
)
from spikefuse.train.optimize import learning_rate
from spikefuse.train.predict import evaluate
from spikefuse.train.processes import Processes
from spikefuse.train.seeding import order

Spikefuse = Callable[..., int]
SHAPES = {"nmnist": (2, 8, 8), "shd": (30,)}
CONFIG = TrainConfig(model="mlp", num_steps=2, batch_size=256, epochs=2, fuse=False)


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


@pytest.mark.parametrize(
    ("options", "processes"),
    [
        ({"batch_size": 1}, 1),
        ({"batch_size": 8, "accumulate": 8}, 1),
        ({"batch_size": 8, "accumulate": 4}, 2),
    ],
)
def test_a_norm_of_one_image_is_refused(options: dict[str, Any], processes: int) -> None:
    """Its steps are the same, so that the norm of a linear layer would be 0."""
    started = Processes(count=processes)
    wanted = "which leaves one image at a time: a batch norm of mlp needs at least two"
    mlp = dataclasses.replace(CONFIG, **options)
    with pytest.raises(ConfigError, match=wanted):
        TrainingModule(mlp, started)
    for other in ({"encoding": "poisson"}, {"model": "conv"}, {"batch_size": 16}):
        TrainingModule(dataclasses.replace(mlp, **other), started)

    class Own(TrainingModule):
        def encode(self, inputs: Any, share: slice = slice(None)) -> Any:
            raise NotImplementedError

    Own(mlp, started)


@pytest.mark.usefixtures("drawn")
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
    module = TrainingModule(TrainConfig(dataset="nmnist", num_steps=5))
    counts = torch.randint(0, 256, (3, 5, 2, 34, 34), dtype=torch.uint8)
    x = module.encode(counts)
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    assert torch.equal(x, counts.transpose(0, 1).float())


def test_frames_of_one_sample_are_augmented_alike() -> None:
    module = TrainingModule(TrainConfig(dataset="nmnist", num_steps=5, shift=3, flip=True))
    still = torch.randint(0, 256, (8, 1, 2, 34, 34), dtype=torch.uint8).expand(8, 5, 2, 34, 34)
    moved, _ = module.augment(still, torch.arange(8))
    assert not torch.equal(moved, still)
    assert torch.equal(moved, moved[:, :1].expand_as(moved))


def test_half_of_the_images_are_mirrored() -> None:
    module = TrainingModule(TrainConfig(shift=0, flip=True))
    images = torch.randint(0, 256, (300, 1, 8, 8), dtype=torch.uint8)
    moved, labels = module.augment(images, torch.arange(300) % 10)
    assert torch.equal(labels, torch.arange(300) % 10)
    mirrored = (moved == images.flip(-1)).flatten(1).all(1)
    still = (moved == images).flatten(1).all(1)
    assert (mirrored ^ still).all()
    assert 100 < mirrored.sum() < 200


MIXES = {
    "mixup": ("digits", {"mixup": 0.5}),
    "cutmix": ("digits", {"cutmix": 1.0}),
    "both": ("digits", {"mixup": 0.5, "cutmix": 1.0}),
    "recordings": ("nmnist", {"mixup": 0.5, "cutmix": 1.0, "num_steps": 3}),
}


@pytest.mark.parametrize("name", MIXES)
def test_mixed_examples_have_mixed_labels(name: str) -> None:
    dataset, options = MIXES[name]
    module = TrainingModule(TrainConfig(dataset=dataset, shift=0, **options))
    shape = (200, 3, *DATASETS[dataset].shape) if "num_steps" in options else (200, 1, 8, 8)
    inputs = torch.randint(1, 256, shape, dtype=torch.uint8)
    labels = torch.arange(200) % 10
    mixed, shares = module.augment(inputs, labels)
    torch.testing.assert_close(shares.sum(1), torch.ones(200))
    own = shares[torch.arange(200), labels]
    assert torch.equal(own + shares[torch.arange(200), labels.roll(1)], shares.sum(1))
    # In a pasted example, each pixel is of one of the two; at most one in a mixed one.
    pasted = ((mixed == inputs) | (mixed == inputs.roll(1, 0))).flatten(1).float().mean(1) == 1
    share = pasted.float().mean()
    assert (
        share == 1 if name == "cutmix" else share < 0.1 if name == "mixup" else 0.35 < share < 0.65
    )
    x = module.encode(mixed)
    assert x.dtype == torch.float32
    assert x.shape == (module.config.num_steps, 200, *shape[-3:])


@pytest.mark.parametrize("loss", ["mean", "last", "every"])
def test_the_loss_of_a_mixture_is_the_mixture_of_losses(loss: str) -> None:
    module = TrainingModule(TrainConfig(loss=loss, label_smoothing=0.1))
    outputs, labels = torch.randn(5, 6, 10), torch.arange(6)
    one_hot, other = torch.eye(10)[labels], torch.eye(10)[labels.roll(1)]
    first, second = module.loss(outputs, labels), module.loss(outputs, labels.roll(1))
    torch.testing.assert_close(module.loss(outputs, one_hot), first)
    mixed = module.loss(outputs, 0.3 * one_hot + 0.7 * other)
    torch.testing.assert_close(mixed, 0.3 * first + 0.7 * second)


def test_all_augmentations_in_a_run(spikefuse: Spikefuse, tmp_path: Path, small: list[str]) -> None:
    """Of images; the same seed gives the same run."""
    options = (
        "--flip --trivial-augment --cutout 3 --erase 0.5 --mixup 0.2 --cutmix 1 --accumulate 2"
    )
    curves = []
    for out in ("a", "b"):
        arguments = shlex.split(f"{options} --model mlp --loss every --epochs 1 --out {out}")
        assert spikefuse("train", *small, *arguments) == 0
        (row,) = torch.load(tmp_path / out / "last.ckpt")["spikefuse"]["history"]
        assert 0 < row["train_loss"] < 4
        assert 0 <= row["train_accuracy"] <= 1
        curves.append((row["train_loss"], row["train_accuracy"]))
    assert curves[0] == curves[1]


def test_recordings_lose_events(events: str) -> None:
    module = TrainingModule(
        TrainConfig(dataset=events, model="mlp", num_steps=5, shift=0, drop_events=True)
    )
    counts = torch.full((80, 5, *SHAPES[events]), 3, dtype=torch.uint8)
    left, _ = module.augment(counts, torch.arange(80))
    share = left.flatten(1).float().mean(1) / 3
    assert 0.1 < (share == 1).float().mean() < 0.5
    assert 0.4 < share.mean() < 0.95


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
    hook = TrainingModule.on_before_optimizer_step

    def watched(self: TrainingModule, optimizer: torch.optim.Optimizer) -> None:
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

    monkeypatch.setattr(run, "device_of", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(run, "_trainer", scaling_trainer)
    monkeypatch.setattr(TrainingModule, "on_before_optimizer_step", watched)
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
    module = TrainingModule(TrainConfig())
    batch = torch.empty(0), torch.empty(0)
    for wait, step in ((3.0, 5.0), (2.0, 5.0), (2.0, 6.0)):  # the first wait precedes the clock
        now += wait
        module.on_train_batch_start(batch, 0)
        now += step
        module.on_train_batch_end()
    assert module.data_wait() == 4.0 / 20.0


class Stepped(TrainingModule):
    """Halves its learning rate after each step, and doubles its loss."""

    rates: list[float]
    when: ClassVar[dict[str, Any]] = {"interval": "step"}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 1.0)
        self.rates = []
        halving = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": halving, **self.when}]

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert outputs.shape == (2, 256, 10)
        return 2 * super().loss(outputs, labels)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


def trainer(**options: Any) -> pl.Trainer:
    quiet: dict[str, Any] = {**options, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"logger": False, "enable_checkpointing": False}
    return pl.Trainer(max_epochs=2, accelerator="cpu", devices=1, **quiet)


def test_a_subclass_in_a_trainer_of_its_own() -> None:
    fit, module, examples = trainer(), Stepped(CONFIG), DataModule(CONFIG)
    fit.fit(module, datamodule=examples)
    assert [row["epoch"] for row in module.history] == [1, 2]  # without the sanity check
    for name in ("train_loss", "train_accuracy", "val_loss", "val_accuracy"):
        assert fit.callback_metrics[name].item() == pytest.approx(module.history[-1][name])
    assert module.rates == [0.5**i for i in range(10)]
    assert module.history[0]["train_loss"] > 1.5 * module.history[0]["val_loss"]
    (measured,) = fit.validate(module, datamodule=examples, verbose=False)
    assert len(module.history) == 2
    assert measured["val_accuracy"] == pytest.approx(module.history[-1]["val_accuracy"])
    (tested,) = fit.test(module, datamodule=examples, verbose=False)
    found = evaluate(module.net, examples.test, CONFIG, module.device, Processes())
    assert tested == pytest.approx({f"test_{name}": value for name, value in found.items()})


@pytest.mark.parametrize(
    ("when", "halvings"),
    [
        ({}, [0] * 5 + [1] * 5),  # after an epoch, as in Lightning
        ({"interval": "epoch"}, [0] * 5 + [1] * 5),
        ({"frequency": 2}, [0] * 10),
        ({"interval": "step", "frequency": 2}, [0, 0, 1, 1, 2, 2, 2, 3, 3, 4]),
    ],
)
def test_schedulers_step_when_lightning_steps_them(
    when: dict[str, Any], halvings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stepped, "when", when)
    module = Stepped(CONFIG)
    trainer().fit(module, datamodule=DataModule(CONFIG))
    assert module.rates == [0.5**n for n in halvings]

    class Automatic(pl.LightningModule):
        """What Lightning itself does."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.rates = torch.nn.Linear(1, 1), list[float]()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 1.0)
            halving = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return [optimizer], [{"scheduler": halving, **when}]

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.rates.append(self.optimizers().param_groups[0]["lr"])
            loss: torch.Tensor = self.layer(batch[0]).sum()
            return loss

    expected = Automatic()
    trainer().fit(expected, DataLoader(TensorDataset(torch.zeros(5, 1))))
    assert module.rates == expected.rates


@pytest.mark.parametrize("limit", [4, 0.7])
def test_epochs_that_the_trainer_shortens(limit: int | float) -> None:
    """Each has as many batches, of its own order, and is validated."""
    seen: list[list[int]] = []

    class Watched(TrainingModule):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            seen.append(batch[1].tolist())
            return super().training_step(batch, batch_idx)

    module, examples = Watched(CONFIG), DataModule(CONFIG)
    trainer(limit_train_batches=limit).fit(module, datamodule=examples)
    taken = 4 if limit == 4 else 3
    assert [row["step"] for row in module.history] == [taken, 2 * taken]
    orders = [order(len(examples.training), CONFIG.seed, epoch).split(256) for epoch in (0, 1)]
    rows = [*orders[0][:taken], *orders[1][:taken]]
    assert seen == [examples.training.labels[row].tolist() for row in rows]


def test_callbacks_of_the_settings() -> None:
    config = dataclasses.replace(CONFIG, ema=0.5, patience=1, lr=1e-30, epochs=9)
    fit, module = trainer(), TrainingModule(config)
    fit.fit_loop.max_epochs = 9
    fit.fit(module, datamodule=DataModule(config))
    assert len(module.history) < 9  # the average of batch norm statistics may change some
    names = [type(callback).__name__ for callback in fit.callbacks]
    assert names == ["LearningRate", "Patience", "MovingAverage"]


def test_a_loader_of_scaled_images_is_refused() -> None:
    loader = DataLoader(TensorDataset(torch.rand(64, 1, 8, 8), torch.arange(64) % 10), 64)
    message = r"the images are torch\.float32: expected bytes, torch\.uint8"
    with pytest.raises(ConfigError, match=message):
        trainer().fit(TrainingModule(CONFIG), loader, loader)
    with pytest.raises(ConfigError, match=message):
        trainer().validate(TrainingModule(CONFIG), loader, verbose=False)
    with pytest.raises(ConfigError, match=message):
        TrainingModule(CONFIG)(torch.rand(2, 1, 8, 8))

    class Scaled(TrainingModule):
        def encode(self, inputs: torch.Tensor, share: slice = slice(None)) -> torch.Tensor:
            return inputs[share].expand(2, *inputs[share].shape)

    trainer().fit(Scaled(CONFIG), loader, loader)
    module, scaled = TrainingModule(CONFIG), Scaled(CONFIG)
    module.encode = scaled.encode  # type: ignore[method-assign]
    trainer().fit(module, loader, loader)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.arange(64) % 10 + 1, "are from 1 to 10: expected 0 to 9, for 10 outputs"),
        ((torch.arange(64) % 10 - 1).int(), "are from -1 to 8: expected 0 to 9"),
        (
            torch.ones(64, 10),
            r"float32 \[32, 10\], have sums from 10 to 10 .*: expected class",
        ),
        (torch.eye(10)[:7].repeat(8, 1) * 2 - 0.1, "sums from 1 to 1 and values from -0.1"),
    ],
)
def test_a_loader_of_other_classes_is_refused(labels: torch.Tensor, message: str) -> None:
    images = torch.randint(256, (len(labels), 1, 8, 8), dtype=torch.uint8)
    good = TensorDataset(images[:32], torch.arange(32) % 10)
    bad = DataLoader(torch.utils.data.ConcatDataset([good, TensorDataset(images, labels)]), 32)
    module = TrainingModule(CONFIG)
    with pytest.raises(ConfigError, match=message):
        trainer().fit(module, bad, DataLoader(good, 32))
    with pytest.raises(ConfigError, match=message):
        trainer().validate(module, bad, verbose=False)


def test_labels_that_a_loader_may_have() -> None:
    images = torch.randint(256, (64, 1, 8, 8), dtype=torch.uint8)
    classes = torch.arange(64) % 10
    ignored, mixed = classes.where(classes > 2, -100), torch.rand(64, 10).softmax(1)
    for labels in (ignored, ignored.new_full((64,), -100), classes.byte(), mixed, mixed.half()):
        loader = DataLoader(TensorDataset(images, labels), 32)
        trainer().validate(TrainingModule(CONFIG), loader, verbose=False)

    class Own(TrainingModule):
        def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.binary_cross_entropy_with_logits(outputs.mean(0), labels)

    loader = DataLoader(TensorDataset(images, torch.ones(64, 10)), 32)
    trainer().fit(Own(CONFIG), loader, loader)


def test_inputs_of_an_encoding_of_the_users_own() -> None:
    """They may be of any type, such as pairs of images."""

    class Pairs(TrainingModule):
        def encode(self, inputs: Any, share: slice = slice(None)) -> torch.Tensor:
            return torch.stack([x[share] for x in inputs])  # two steps

    pairs = [((x, x), i % 10) for i, x in enumerate(torch.rand(64, 1, 8, 8))]
    loader: Any = DataLoader(pairs, 64)  # type: ignore[arg-type]
    fit, config = trainer(), dataclasses.replace(CONFIG, shift=0)
    fit.fit(Pairs(config), loader, loader)
    assert fit.state.finished


class Around(torch.nn.Module):
    """Two networks over time, of which the second one reads the steps in reverse."""

    def __init__(self) -> None:
        super().__init__()
        first = torch.nn.Flatten(), torch.nn.Linear(64, 32), sf.LIF(threshold=0.1)
        self.net = sf.Temporal(torch.nn.Sequential(*first))
        second = sf.PLIF(threshold=0.1), torch.nn.Linear(32, 10)
        self.last = sf.Temporal(torch.nn.Sequential(*second))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.net(x).flip(0))


def test_a_network_around_temporals() -> None:
    class Own(TrainingModule):
        def make_network(self) -> torch.nn.Module:
            return Around()

    config = CONFIG.replaced(rate_penalty=1.0, num_steps=4)
    module = Own(config)
    images = torch.randint(256, (5, 1, 8, 8), dtype=torch.uint8)
    with sf.record(module.net) as record:
        module.net(module.encode(images))
    assert len(record.rates) == 2
    module.net(module.encode(images))
    assert module._penalty().item() == pytest.approx(sum(record.rates.values()) / 2)
    loader = DataLoader(TensorDataset(images.repeat(8, 1, 1, 1), torch.arange(40) % 5), 40)
    trainer().fit(module, loader, loader)
    loss = [row["train_loss"] for row in module.history]
    assert loss[1] < loss[0]


@pytest.mark.parametrize("made", [torch.nn.Linear(64, 10), None])
def test_a_forgotten_temporal_is_named(made: Any) -> None:
    class Own(TrainingModule):
        def make_network(self) -> Any:
            return made

    message = f"of type {type(made).__name__}: expected a Temporal, or a module around some; wrap"
    with pytest.raises(ConfigError, match=message):
        Own(CONFIG)


def test_a_data_loader_shuffles_each_epoch_anew() -> None:
    """It draws from the generator that training and validation seed."""
    seen: list[list[int]] = []

    class Watched(TrainingModule):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            seen.append(batch[0][:, 0, 0, 0].tolist())
            return super().training_step(batch, batch_idx)

    config = dataclasses.replace(CONFIG, epochs=4, encoding="poisson")
    images = torch.arange(64, dtype=torch.uint8).view(64, 1, 1, 1).expand(64, 1, 8, 8)
    examples = TensorDataset(images, torch.arange(64) % 10)
    loaders = DataLoader(examples, 64, shuffle=True), DataLoader(examples, 64)
    fit = trainer()
    fit.fit_loop.max_epochs = 4
    fit.fit(Watched(config), *loaders)
    assert len({*map(tuple, seen)}) == 4


def test_processes_that_the_module_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pl.Trainer, "world_size", property(lambda self: 2))
    with pytest.raises(ConfigError, match="the trainer has 2 processes, but the module has 1"):
        trainer().fit(TrainingModule(CONFIG), datamodule=DataModule(CONFIG))


def test_the_precision_of_the_trainer_is_that_of_the_module() -> None:
    with pytest.raises(
        ConfigError, match=r"the trainer has precision 'bf16-mixed', and the module"
    ):
        trainer(precision="bf16-mixed").fit(TrainingModule(CONFIG), datamodule=DataModule(CONFIG))


def test_optimizers_that_the_step_cannot_use() -> None:
    class Two(TrainingModule):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), 0.1) for _ in range(2)]

    class Plateau(TrainingModule):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]

    class Batch(Stepped):
        when: ClassVar[dict[str, Any]] = {"interval": "batch"}

    for kind, message in (
        (Two, "returned 2 optimizers: expected one"),
        (Plateau, "needs a metr"),
        (Batch, "a scheduler with interval 'batch': expected 'step' or 'epoch'"),
    ):
        with pytest.raises(ConfigError, match=message):
            trainer().fit(kind(CONFIG), datamodule=DataModule(CONFIG))


class Grouped(TrainingModule):
    """Has a group of parameters with a learning rate and a momentum of its own."""

    def configure_optimizers(self) -> Any:
        self.seen: list[list[float]] = []
        first, *others = self.parameters()
        own = {"params": [first], "lr": 0.5, "momentum": 0.25}
        return torch.optim.SGD([own, {"params": others}], lr=0.01, momentum=0.9)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.append([g[name] for g in optimizer.param_groups for name in ("lr", "momentum")])


def test_groups_of_parameters_keep_their_options(tmp_path: Path) -> None:
    config = TrainConfig(
        dataset="digits", model="mlp", batch_size=256, epochs=2, schedule="cosine", lr=0.01
    )
    fit, module, examples = trainer(), Grouped(config), DataModule(config)
    fit.fit(module, datamodule=examples)
    rates = [learning_rate(config, step, 5) for step in range(10)]
    expected = [pytest.approx([50 * rate, 0.25, rate, 0.9]) for rate in rates]
    assert module.seen == expected

    path, first, resumed = str(tmp_path / "first.ckpt"), Grouped(config), Grouped(config)
    short = trainer(max_steps=5)
    short.fit(first, datamodule=DataModule(config))
    short.save_checkpoint(path)
    trainer().fit(resumed, datamodule=DataModule(config), ckpt_path=path)
    assert first.seen + resumed.seen == expected


def test_groups_of_parameters_that_a_callback_adds() -> None:
    class Adding(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if trainer.current_epoch == 1:
                new = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
                trainer.optimizers[0].add_param_group({"params": [new[0]]})
                trainer.optimizers[0].add_param_group({"params": [new[1]], "lr": 0.02})

    module = Grouped(dataclasses.replace(CONFIG, lr=0.01))
    trainer(callbacks=[Adding()]).fit(module, datamodule=DataModule(module.config))
    rates = [row[::2] for row in module.seen]
    assert rates[4] == pytest.approx([0.5, 0.01])
    assert rates[-1] == pytest.approx([0.5, 0.01, 0.01, 0.02])


def test_a_learning_rate_that_the_schedule_replaces() -> None:
    class Own(TrainingModule):
        rate: Any = 0.25
        options: dict[str, Any] = {}  # noqa: RUF012

        def configure_optimizers(self) -> Any:
            groups = [{"params": [p]} for p in self.parameters()]
            groups[0] |= self.options
            return torch.optim.SGD(groups, **({} if self.rate is None else {"lr": self.rate}))

    def fit(module: Own) -> None:
        trainer(fast_dev_run=True).fit(module, datamodule=DataModule(module.config))

    message = r"with lr=0.25, which the schedule replaces by that of the configuration, 0.1"
    module = Own(dataclasses.replace(CONFIG, lr=0.1))
    with pytest.warns(UserWarning, match=message):
        fit(module)
    # The rate of a group is relative to the default of the class, which nobody has chosen.
    module.rate, module.options = None, {"lr": 0.1}
    with pytest.warns(UserWarning, match=r"with lr=0.001, which the schedule replaces"):
        fit(module)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="configure_optimizers")
        module.options = {}
        fit(module)
        module.rate = torch.tensor(0.1)  # in float32, not exactly 0.1
        fit(module)


def test_a_schedule_ends_with_the_trainer() -> None:
    for schedule in ("cosine", "step", "one-cycle"):
        config = TrainConfig(model="mlp", epochs=3, schedule=schedule)
        with pytest.raises(
            ConfigError, match=f"max_epochs 2, and the schedule {schedule} is for 3"
        ):
            trainer().fit(TrainingModule(config), datamodule=DataModule(config))
    trainer(fast_dev_run=True).fit(TrainingModule(config), datamodule=DataModule(config))


def test_public_names() -> None:
    assert TrainingModule is training_module.TrainingModule
    with pytest.raises(AttributeError, match="no attribute 'Clasifier'"):
        _ = train.Clasifier
