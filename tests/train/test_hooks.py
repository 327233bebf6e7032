"""Hooks of a training module run also where a subclass overrides them without `super()`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from spikefuse.train import ConfigError, DataModule, TrainConfig, TrainingModule

CONFIG = TrainConfig(
    model="mlp", num_steps=2, batch_size=128, epochs=3, optimizer="sgd", lr=0.125, fuse=False
)
#: Hooks of ours, but for those of checkpoints and callbacks.
HOOKS = [
    *("on_fit_start", "on_train_start", "on_train_end", "on_train_epoch_start"),
    *("on_train_batch_start", "on_train_batch_end", "on_before_optimizer_step"),
    *("on_validation_epoch_start", "on_validation_epoch_end"),
    *("on_test_epoch_start", "on_test_epoch_end"),
]


def trainer(epochs: int, **options: Any) -> pl.Trainer:
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return pl.Trainer(
        max_epochs=epochs, accelerator="cpu", **dict.fromkeys(quiet, False), **options
    )


def overriding(called: list[str]) -> type[TrainingModule]:
    """A class whose hooks call none of ours."""

    def hook(name: str) -> Any:
        return lambda self, *args: called.append(name)

    return type("Overriding", (TrainingModule,), {name: hook(name) for name in HOOKS})


def test_hooks_that_call_none_of_ours() -> None:
    config, called = dataclasses.replace(CONFIG, clip=1e-3), list[str]()
    found = {}
    for kind in (TrainingModule, overriding(called)):
        fit, module, examples = trainer(3), kind(config), DataModule(config)
        fit.fit(module, datamodule=examples)
        (test,) = fit.test(module, datamodule=examples, verbose=False)
        timed = ("images_per_second", "data_wait")
        rows = [{k: v for k, v in row.items() if k not in timed} for row in module.history]
        assert all(row["images_per_second"] > 10 for row in module.history)
        found[kind.__name__] = rows, test, [p.tolist() for p in module.parameters()]
    assert found["Overriding"] == found["TrainingModule"]
    assert len(found["Overriding"][0]) == 3
    assert set(called) == {*HOOKS}


@pytest.mark.parametrize("calls", [False, True])
def test_ours_run_once(calls: bool) -> None:
    order: list[str] = []

    class Counted(TrainingModule):
        def on_test_epoch_end(self) -> None:
            order.append("first")
            super().on_test_epoch_end()

        def log_dict(self, *args: Any, **options: Any) -> None:
            order.append("ours")

    class Mixin:
        def on_test_epoch_end(self) -> None:
            order.append("mixin")

    class Derived(Counted):
        def on_test_epoch_end(self) -> None:
            if calls:
                super().on_test_epoch_end()
            order.append("derived")

    class Mixed(Mixin, TrainingModule):
        log_dict = Counted.log_dict

    examples = DataModule(CONFIG)
    trainer(3).test(Derived(CONFIG), datamodule=examples, verbose=False)
    assert order == (["first", "ours", "derived"] if calls else ["derived", "ours"])
    order.clear()
    trainer(3).test(Mixed(CONFIG), datamodule=examples, verbose=False)
    assert order == ["mixin", "ours"]


def test_callbacks_of_a_subclass_are_added() -> None:
    class Own(TrainingModule):
        def configure_callbacks(self) -> Any:
            return pl.callbacks.Timer()

    config = dataclasses.replace(CONFIG, epochs=9, patience=1, lr=1e-30)
    stopped = []
    for kind in (TrainingModule, Own):
        fit = trainer(9)
        fit.fit(kind(config), datamodule=DataModule(config))
        stopped.append(fit.current_epoch)
    assert stopped[0] == stopped[1] < 9
    assert any(isinstance(c, pl.callbacks.Timer) for c in fit.callbacks)


class Plateau(TrainingModule):
    """Halves its learning rate after each epoch but the first, in a hook."""

    def configure_optimizers(self) -> Any:
        self.rates: list[float] = []
        optimizer = torch.optim.SGD(self.parameters(), self.config.lr)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return optimizer

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.plateau.step(1.0)


def test_a_hook_may_change_a_constant_rate() -> None:
    module = Plateau(CONFIG)
    trainer(3).fit(module, datamodule=DataModule(CONFIG))
    steps = len(module.rates) // 3
    assert module.rates == [0.125] * 2 * steps + [0.0625] * steps
    warm = Plateau(dataclasses.replace(CONFIG, warmup=1.0))
    trainer(3).fit(warm, datamodule=DataModule(CONFIG))
    assert warm.rates[steps:] == module.rates[steps:]


def test_a_second_fit_continues_the_schedule() -> None:
    """It makes another optimizer."""

    class Stopping(Plateau):
        def on_train_epoch_end(self) -> None:
            if self.current_epoch == 1:
                self.trainer.should_stop = True

        def on_validation_epoch_end(self) -> None:
            pass

    config = dataclasses.replace(CONFIG, epochs=4, schedule="step", step_epochs=1)
    fit, module, examples = trainer(4), Stopping(config), DataModule(config)
    fit.fit(module, datamodule=examples)
    steps = len(module.rates) // 2
    fit.should_stop = False
    fit.fit(module, datamodule=examples)
    assert module.rates[::steps] == pytest.approx([0.125 * 0.1**i for i in (2, 3)])


@pytest.mark.parametrize("lr", [0.125, 0.5])
def test_the_rate_of_a_checkpoint_is_that_of_its_settings(lr: float, tmp_path: Path) -> None:
    """A rate that a hook has changed is kept; another one in the settings takes its place."""
    first, examples = Plateau(CONFIG), DataModule(CONFIG)
    fit = trainer(3)
    fit.fit(first, datamodule=examples)
    fit.save_checkpoint(tmp_path / "last.ckpt")
    second = Plateau(dataclasses.replace(CONFIG, lr=lr, epochs=4))
    trainer(4).fit(second, datamodule=examples, ckpt_path=tmp_path / "last.ckpt")
    assert {*second.rates} == {0.03125 if lr == 0.125 else 0.5}


@pytest.mark.parametrize("name", ["loss", "augment", "gradients"])
def test_labels_of_a_subclass_may_have_any_shape(name: str) -> None:
    class Squeezed(TrainingModule):
        pass

    def loss(self: Any, outputs: Tensor, labels: Tensor) -> Tensor:
        return TrainingModule.loss(self, outputs, labels.flatten())

    def augment(self: Any, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, labels.flatten()

    def gradients(self: Any, inputs: Tensor, labels: Tensor) -> Any:
        return TrainingModule.gradients(self, inputs, labels.flatten())

    setattr(Squeezed, name, {"loss": loss, "augment": augment, "gradients": gradients}[name])
    module = Squeezed(CONFIG)
    batch = torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.zeros(4, 1).long()
    module._check_batch(*batch, batch_idx=0)


class Endless(IterableDataset):
    """Images without a known number."""

    def __init__(self, dtype: torch.dtype = torch.uint8) -> None:
        self.dtype = dtype

    def __iter__(self) -> Any:
        for i in range(100):
            yield torch.full((1, 8, 8), i).to(self.dtype), i % 10


def test_loaders_without_a_length() -> None:
    loader = DataLoader(Endless(), 25)
    module = Plateau(CONFIG)
    trainer(3).fit(module, loader, loader)
    assert module.rates == [0.125] * 8 + [0.0625] * 4

    class ByEpoch(Plateau):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

        def on_validation_epoch_end(self) -> None:
            pass

    module = ByEpoch(CONFIG)
    trainer(3).fit(module, loader, loader)
    assert module.rates == [0.125] * 4 + [0.0625] * 4 + [0.03125] * 4
    cosine = TrainingModule(dataclasses.replace(CONFIG, schedule="cosine"))
    with pytest.raises(ConfigError, match="the loader has no length, which the schedule cosine"):
        trainer(3).fit(cosine, loader, loader)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_images_other_than_bytes_are_refused(dtype: torch.dtype) -> None:
    loader = DataLoader(Endless(dtype), 25)
    with pytest.raises(ConfigError, match=f"the images are {dtype}: expected bytes"):
        trainer(3).fit(TrainingModule(CONFIG), loader, loader)


@pytest.mark.parametrize("shape", [(8, 8, 1), (8, 8, 3), (64,), (8, 8)])
def test_images_of_another_layout_are_refused(shape: tuple[int, ...]) -> None:
    images = torch.zeros(25, *shape, dtype=torch.uint8)
    loader = DataLoader([(images, torch.zeros(25).long())], None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"the images are \[25, .*: expected \[B, C, H, W\]"):
        trainer(3).fit(TrainingModule(CONFIG), loader, loader)


def test_predictions_for_a_loader_with_labels() -> None:
    module, loader = TrainingModule(CONFIG), DataLoader(Endless(), 25)
    found = trainer(3).predict(module, loader)
    inputs = [x for x, _ in loader]
    expected = trainer(3).predict(module, DataLoader(inputs, None))  # type: ignore[arg-type]
    assert isinstance(found, list)
    assert isinstance(expected, list)
    assert [len(y) for y in found] == [25] * 4
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Moved(pl.Callback):
    """The rates that callbacks find before a step, and by how much a bias has moved in it."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.moves: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.before = [*module.parameters()][-1].detach().clone()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        bias = [*module.parameters()][-1].detach()
        self.moves.append((bias - self.before).abs().max().item())


def test_callbacks_read_the_rate_of_the_step() -> None:
    """SignSGD, by Adam without averages, moves each weight by the rate."""
    config = dataclasses.replace(CONFIG, optimizer="adam", schedule="cosine", warmup=1.0)

    class Signs(TrainingModule):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), config.lr, betas=(0.0, 0.0), eps=1e-30)

    moved = Moved()
    trainer(3, callbacks=[moved]).fit(Signs(config), datamodule=DataModule(config))
    assert len({*moved.rates}) > 15
    assert moved.rates[0] < 0.02
    assert moved.rates == pytest.approx(moved.moves, rel=1e-4)


def test_several_loaders_to_evaluate() -> None:
    class Several(TrainingModule):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx)

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().test_step(batch, batch_idx)

    loaders = [DataLoader(Endless(), 25)] * 2
    for run in (trainer(3).validate, trainer(3).test):
        with pytest.raises(ConfigError, match="a second loader begins, and the metrics of each"):
            run(Several(CONFIG), loaders)

    class First(TrainingModule):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            if dataloader_idx == 0:
                super().validation_step(batch, batch_idx)

    (expected,) = trainer(3).validate(First(CONFIG), loaders[0], verbose=False)
    found, _ = trainer(3).validate(First(CONFIG), loaders, verbose=False)
    assert [*found.values()] == [*expected.values()]


SEQUENCE = {"task": "sequence", "loss": "every"}


@pytest.mark.parametrize(
    ("options", "labels", "message"),
    [
        ({}, torch.zeros(8, 1).long(), r"torch.int64 \[8, 1\]: expected \[B\], whole numbers of"),
        ({}, torch.zeros(8), r"expected \[B, 10\], probabilities of classes; classes themselves"),
        ({"task": "regression"}, torch.zeros(8), r"\[8\]: expected \[B, 10\], values"),
        ({"task": "regression"}, torch.zeros(8, 3), r"\[8, 3\]: expected \[B, 10\], values"),
        (SEQUENCE, torch.zeros(8, 2), r"\[8, 2\]: expected \[B, T, 10\], values"),
        (
            {**SEQUENCE, "criterion": "cross-entropy"},
            torch.zeros(8).long(),
            r"\[8\]: expected \[B, T\], whole numbers of classes",
        ),
        (
            {**SEQUENCE, "criterion": "cross-entropy"},
            torch.zeros(8, 2),
            r"torch.float32 \[8, 2\]: expected \[B, T\], whole numbers of classes",
        ),
    ],
)
def test_labels_of_another_shape(options: dict[str, Any], labels: Tensor, message: str) -> None:
    config = TrainConfig(**{**dataclasses.asdict(CONFIG), "criterion": None, **options})
    batch = torch.zeros(8, 1, 8, 8, dtype=torch.uint8), labels
    loader = DataLoader([batch], None)
    for first in (0, 1):  # in training, and in validation
        with pytest.raises(ConfigError, match=message):
            trainer(3, num_sanity_val_steps=first).fit(TrainingModule(config), loader, loader)
