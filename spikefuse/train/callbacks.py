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
from spikefuse.train.classifier import LOG_EVERY_STEPS, best_row
from spikefuse.train.interruption import Interruption
from spikefuse.train.processes import Processes

REFRESH_SECONDS = 0.25
# A long epoch is saved within, too, at the first chance after so long.
SAVE_SECONDS = 600.0
# Steps between two questions whether any process of several has been asked to stop.
AGREE_EVERY_STEPS = 10
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
            f"accuracy {100 * accuracy:.2f} %, waiting for data {100 * module.waited():.0f} %"
        )
        self._shown = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        row, width = module.history[-1], len(str(trainer.max_epochs))
        dropped = f"dropped {100 * row['dropped']:.2g} %  " if row.get("dropped") else ""
        tqdm.write(
            f"epoch {row['epoch']:{width}.0f}/{trainer.max_epochs}  "
            f"loss {row['train_loss']:.4f}  accuracy {100 * row['train_accuracy']:6.2f} %  "
            f"validation: loss {row['val_loss']:.4f}  "
            f"accuracy {100 * row['val_accuracy']:6.2f} %  "
            f"{dropped}waiting for data {100 * row['data_wait']:.1f} %  "
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
        activities = (name for name in row if name.startswith(("activity_", "dropped")))
        for name in ("images_per_second", "data_wait", *activities):
            self.writer.add_scalar(name, row[name], int(row["step"]))
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
    """Saves the last and the best epoch, a long epoch within, and, when asked to stop, the step
    just done.

    Lightning calls a `Checkpoint` after all other callbacks of an epoch's end. Every process of a
    run has one: to save is a thing that they do together, in which the main one writes.

    Args:
        directory: where to.
        interruption: the request to stop.
        processes: those of the run.
    """

    def __init__(self, directory: Path, interruption: Interruption, processes: Processes) -> None:
        self.directory, self.interruption = directory, interruption
        self.processes = processes
        self._saved = time.monotonic()

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.interruption.listen()  # Lightning has put a handler of its own before ours
        # The end of one of several processes leaves no time to save anything.
        if self.processes.count > 1:
            self._save(trainer)

    def _save(self, trainer: pl.Trainer, best: bool = False) -> None:
        self._saved = time.monotonic()
        if not self.processes.main:
            trainer.save_checkpoint(self.directory / LAST)  # which writes nothing here
            return
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
        done = index + 1
        # After an epoch's last batch its validation comes first: `on_train_epoch_end` stops.
        if done == trainer.num_training_batches:
            return
        if self.processes.count == 1 or done % AGREE_EVERY_STEPS == 0:
            self._stop_if_asked(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._save(trainer, best=best_row(module.history) is module.history[-1])
        self._stop_if_asked(trainer, saved=True)

    def _stop_if_asked(self, trainer: pl.Trainer, saved: bool = False) -> None:
        due = time.monotonic() - self._saved > SAVE_SECONDS
        asked = self.processes.highest(self.interruption.requested or (-1 if due else -2))
        if not saved and asked > -2:
            self._save(trainer)
        if asked > 0:
            self.interruption.requested = asked
            self.interruption.stop()
