"""The Lightning data module: a dataset, split and in batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from spikefuse import data
from spikefuse.data import DataError, Examples
from spikefuse.train import batches, own
from spikefuse.train.batches import EvalBatches, TrainBatches, load_examples
from spikefuse.train.config import TrainConfig
from spikefuse.train.fields import ConfigError

VALIDATION_FRACTION = 0.1
# Fixed, so that runs with different seeds are validated on the same examples.
VALIDATION_SEED = 1


class DataModule(pl.LightningDataModule):
    """The data of a run: training, validation and test examples.

    Without published examples for validation, a tenth of the training examples validates.

    Batches are (inputs, labels): uint8 images `[B, C, H, W]` or event frames `[B, T, ...]`, float32
    series `[B, T, ...]`, or for event models packed frames; and targets of the task. On a GPU with
    enough memory, all examples are there when the first batch is read. The seed and the number of
    steps determine the order of training.

    Override `load` for other examples of the shape and the classes that `config.dataset` has, or a
    method of Lightning's `LightningDataModule` for other batches.

    Args:
        config: settings of the run.
        directory, download: as in `data.load`.

    Attributes:
        config: the settings, with the classes of the files after `setup`.
        training, validation, test: the examples, after `setup`.
        label_checksums: of each part that was loaded, after `setup`.
    """

    training: Examples
    validation: Examples
    test: Examples
    label_checksums: list[int]

    def __init__(
        self, config: TrainConfig, directory: Path | str | None = None, download: bool = False
    ) -> None:
        super().__init__()
        self.config, self.directory, self.download = config, directory, download
        self._ready = False

    def load(self) -> tuple[Examples, ...]:
        """Load (training, test) or (training, validation, test) examples.

        If the classes and the shape depend on the files, `config` gets them.

        Raises:
            DataError: a file is missing or damaged, or the download failed.
            ConfigError: the run has other classes.
        """
        self.config, parts = load_examples(self.config, self.directory, self.download)
        return parts

    def prepare_data(self) -> None:
        if self.download and not self._ready:
            self.load()

    def setup(self, stage: str | None = None) -> None:
        """Load and split the examples, once.

        Raises:
            DataError: they do not fit the description of the dataset, are too few to hold some out,
                or cannot be loaded.
            ConfigError: there are fewer training examples than in a batch.
        """
        if self._ready:
            return
        examples = self.load()
        config = self.config
        own.check_examples(config, examples)
        rest, *published, self.test = examples
        parts = rest, *published
        if not published:
            parts = data.split(rest, VALIDATION_FRACTION, VALIDATION_SEED)
            if len(parts[1]) == 0:
                raise DataError(
                    f"the dataset {config.dataset} has {len(rest)} training examples, too few to "
                    "hold out a tenth for validation: add some, or read (training, validation, "
                    "test)"
                )
        self.training, self.validation = parts
        self.label_checksums = batches.checksums(examples)
        if config.batch_size > len(self.training):
            raise ConfigError(
                f"batch_size is {config.batch_size}: {config.dataset} has only "
                f"{len(self.training)} training samples: choose at most that many"
            )
        self._ready = True

    def train_dataloader(self) -> TrainBatches:
        order = {"seed": self.config.seed, "steps_done": self._steps_done}
        return self._batches(self.training, TrainBatches, **order)

    @property
    def num_batches(self) -> int:
        """Training batches of an epoch."""
        return len(self.training) // self.config.batch_size

    def _steps_done(self) -> int:
        """Return the steps done, with epochs that the trainer's limit_train_batches ends as whole.

        Lightning knows the number of batches of an epoch only after it has begun the first one.
        """
        if self.trainer is None:
            return 0
        whole, limit = self.num_batches, self.trainer.limit_train_batches
        limited = int(whole * limit) if isinstance(limit, float) else min(whole, limit)
        epoch, batch = divmod(self.trainer.global_step, max(limited, 1))
        return epoch * whole + batch

    def val_dataloader(self) -> EvalBatches:
        return self._batches(self.validation)

    def test_dataloader(self) -> EvalBatches:
        return self._batches(self.test)

    def _batches(self, examples: Examples, kind: Any = EvalBatches, **order: Any) -> Any:
        config = self.config
        device = batches.CPU if self.trainer is None else self.trainer.strategy.root_device
        return kind(examples, config.batch_size, device, config.on_events, **order)
