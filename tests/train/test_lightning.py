"""The module and the data module in a Lightning trainer of the user's own."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from spikefuse import data, train
from spikefuse.train import Classifier, ConfigError, DataModule, TrainConfig, classifier
from spikefuse.train.seeding import order

CONFIG = TrainConfig(model="mlp", num_steps=2, batch_size=256, epochs=2)


class Stepped(Classifier):
    """Halves its learning rate after each step, and doubles its loss."""

    rates: list[float]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 1.0)
        self.rates = []
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

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
    loss, accuracy = module.evaluate(examples.test_dataloader())
    assert [tested["test_loss"], tested["test_accuracy"]] == pytest.approx([loss, accuracy])


def test_the_data_module_splits_as_the_command_does() -> None:
    examples = DataModule(CONFIG)
    examples.setup("fit")
    rest, test = data.load("digits")
    assert len(examples.training) + len(examples.validation) == len(rest)
    assert torch.equal(examples.test.pixels, test.pixels)
    before = examples.training
    examples.setup("test")
    assert examples.training is before
    inputs, labels = next(iter(examples.train_dataloader()))
    assert (inputs.dtype, inputs.shape, labels.shape) == (torch.uint8, (256, 1, 8, 8), (256,))
    with pytest.raises(ConfigError, match="batch_size is 9999: digits has only 1295 training"):
        DataModule(TrainConfig(batch_size=9999)).setup()


@pytest.mark.parametrize("limit", [4, 0.7])
def test_epochs_that_the_trainer_shortens(limit: int | float) -> None:
    """Each has as many batches, of its own order, and is validated."""
    seen: list[list[int]] = []

    class Watched(Classifier):
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


def test_too_few_examples_to_hold_some_out(monkeypatch: pytest.MonkeyPatch) -> None:
    train_part, test = data.load("digits")
    monkeypatch.setattr(DataModule, "load", lambda self: (train_part[:20], test))
    with pytest.raises(data.DataError, match="digits has 20 training examples, too few of each"):
        DataModule(TrainConfig(batch_size=4)).setup()


def test_published_validation_examples_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    train_part, test = data.load("digits")
    parts = train_part[:300], train_part[300:340], test
    monkeypatch.setattr(DataModule, "load", lambda self: parts)
    examples = DataModule(CONFIG)
    examples.setup()
    assert (len(examples.training), len(examples.validation)) == (300, 40)
    assert torch.equal(examples.training.pixels, parts[0].pixels)
    assert torch.equal(examples.test.labels, test.labels)
    wrong = data.Images(parts[1].pixels, parts[1].labels + 10)
    monkeypatch.setattr(DataModule, "load", lambda self: (parts[0], wrong, test))
    with pytest.raises(data.DataError, match="has read validation labels from 10 to 19"):
        DataModule(CONFIG).setup()


def test_processes_that_the_module_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pl.Trainer, "world_size", property(lambda self: 2))
    with pytest.raises(ConfigError, match="the trainer has 2 processes, but the module has 1"):
        trainer().fit(Classifier(CONFIG), datamodule=DataModule(CONFIG))


def test_the_precision_of_the_trainer_is_that_of_the_module() -> None:
    with pytest.raises(
        ConfigError, match=r"the trainer has precision 'bf16-mixed', and the module"
    ):
        trainer(precision="bf16-mixed").fit(Classifier(CONFIG), datamodule=DataModule(CONFIG))


def test_optimizers_that_the_step_cannot_use() -> None:
    class Two(Classifier):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), 0.1) for _ in range(2)]

    class Plateau(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]

    for kind, message in ((Two, "returned 2 optimizers: expected one"), (Plateau, "needs a metr")):
        with pytest.raises(ConfigError, match=message):
            trainer().fit(kind(CONFIG), datamodule=DataModule(CONFIG))


def test_a_schedule_ends_with_the_trainer() -> None:
    for schedule in ("cosine", "step", "one-cycle"):
        config = TrainConfig(model="mlp", epochs=3, schedule=schedule)
        with pytest.raises(
            ConfigError, match=f"max_epochs 2, and the schedule {schedule} is for 3"
        ):
            trainer().fit(Classifier(config), datamodule=DataModule(config))
    trainer(fast_dev_run=True).fit(Classifier(config), datamodule=DataModule(config))


def test_public_names() -> None:
    assert Classifier is classifier.Classifier
    with pytest.raises(AttributeError, match="no attribute 'Clasifier'"):
        _ = train.Clasifier
