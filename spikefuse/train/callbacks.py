"""What happens around the steps: progress on the terminal, logs, checkpoints."""

from __future__ import annotations

import csv
import shutil
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, Checkpoint
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from spikefuse.train.checkpoint import BEST, LAST, replacing
from spikefuse.train.classifier import best_row
from spikefuse.train.interruption import Interruption

REFRESH_SECONDS = 0.25
LOG_EVERY_STEPS = 10
METRICS = "metrics.csv"
TENSORBOARD = "tensorboard"


class Progress(Callback):
    """A live bar over the whole run on a terminal, and one line per epoch anywhere."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        total = trainer.num_training_batches * (trainer.max_epochs or 0)
        self._shown = 0.0
        self.bar = tqdm(
            desc="first step: making kernels",
            total=total,
            initial=trainer.global_step,
            disable=None,
            leave=False,
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
        )

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.bar.update()
        if self.bar.disable or time.perf_counter() - self._shown < REFRESH_SECONDS:
            return
        loss, accuracy = module.tally.mean()
        self.bar.set_description(f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}", False)
        self.bar.set_postfix_str(
            f"{module.images_per_second():,.0f} images/s, loss {loss:.4f}, "
            f"accuracy {100 * accuracy:.2f} %"
        )
        self._shown = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        row, width = module.history[-1], len(str(trainer.max_epochs))
        tqdm.write(
            f"epoch {row['epoch']:{width}.0f}/{trainer.max_epochs}  "
            f"loss {row['train_loss']:.4f}  accuracy {100 * row['train_accuracy']:6.2f} %  "
            f"validation: loss {row['val_loss']:.4f}  "
            f"accuracy {100 * row['val_accuracy']:6.2f} %  "
            f"{row['images_per_second']:,.0f} images/s"
        )

    def on_train_end(self, *_: Any) -> None:
        self.bar.close()

    def on_exception(self, *_: Any) -> None:
        if hasattr(self, "bar"):
            self.bar.close()


class Log(Callback):
    """TensorBoard, and a CSV file with one row per epoch, the epochs before a resumption
    included."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_start(self, *_: Any) -> None:
        self.writer = SummaryWriter(str(self.directory / TENSORBOARD))

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        step = trainer.global_step
        if step % LOG_EVERY_STEPS == 0:
            self.writer.add_scalar("loss/step", outputs["loss"].item(), step)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        row = module.history[-1]
        for part in ("train", "val"):
            for quantity in ("loss", "accuracy"):
                value = row[f"{part}_{quantity}"]
                self.writer.add_scalar(f"{quantity}/{part}", value, int(row["step"]))
        self.writer.add_scalar("images_per_second", row["images_per_second"], int(row["step"]))
        with replacing(self.directory / METRICS) as path, path.open("w", newline="") as file:
            table = csv.DictWriter(file, list(row))
            table.writeheader()
            table.writerows(module.history)

    def on_train_end(self, *_: Any) -> None:
        self.writer.close()

    def on_exception(self, *_: Any) -> None:
        if hasattr(self, "writer"):
            self.writer.close()


class Checkpoints(Checkpoint):
    """Saves the last and the best epoch, and, when asked to stop, the step just done.

    Lightning calls a `Checkpoint` after all other callbacks of an epoch's end.
    """

    def __init__(self, directory: Path, interruption: Interruption) -> None:
        self.directory, self.interruption = directory, interruption

    def _save(self, trainer: pl.Trainer, best: bool = False) -> None:
        with replacing(self.directory / LAST) as path:
            trainer.save_checkpoint(path)
            # Before LAST is replaced: a run that is resumed from LAST repeats what follows it, so
            # BEST may be ahead of LAST, but never behind.
            if best:
                with replacing(self.directory / BEST) as copy:
                    shutil.copyfile(path, copy)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        # After an epoch's last batch its validation comes first: `on_train_epoch_end` stops.
        if self.interruption.requested and index + 1 < trainer.num_training_batches:
            self._save(trainer)
            self.interruption.stop()

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._save(trainer, best=best_row(module.history) is module.history[-1])
        if self.interruption.requested:
            self.interruption.stop()
