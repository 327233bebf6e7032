"""Lightning callbacks: progress on the terminal, metrics, and checkpoints."""

from __future__ import annotations

import csv
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint
from tqdm import tqdm

from spikefuse.data import Examples
from spikefuse.data.files import replacing
from spikefuse.inspect.record import first_outputs, record
from spikefuse.train.batches import contents
from spikefuse.train.checkpoint import BEST, LAST, EpochMetrics, best_epoch
from spikefuse.train.output import show
from spikefuse.train.signals import SignalHandler
from spikefuse.train.training_module import LOG_EVERY_STEPS

OBSERVED = 32  # validation examples whose spikes are counted
LONG_WAIT = 0.2  # share of an epoch that a user should hear of
REFRESH_SECONDS = 0.25
# Time between checkpoints within a long epoch.
SAVE_SECONDS = 600.0
# Steps after which several processes agree on whether to stop.
AGREE_EVERY_STEPS = 10
METRICS = "metrics.csv"


class ProgressReporter(Callback):
    """Show a progress bar on a terminal, and print one line per epoch."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._refreshed, self._first = 0.0, True
        self.bar = tqdm(
            desc="first step: compiling kernels",
            total=trainer.num_training_batches * (trainer.max_epochs or 0),
            initial=trainer.global_step,
            disable=None,
            leave=False,
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
        )

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if self._first:  # the first call of the network reports what was fused
            self._first = False
            fusion = getattr(module.net, "fusion", None)
            if fusion is not None and fusion.fused:
                show(fusion.summary)
        self.bar.update()
        if self.bar.disable or time.perf_counter() - self._refreshed < REFRESH_SECONDS:
            return
        metrics = module.totals.mean()
        self.bar.set_description(f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}", False)
        self.bar.set_postfix_str(
            f"{module.images_per_second():,.0f} images/s, {module.task.in_brief(metrics)}, "
            f"waiting for data {100 * module.data_wait():.0f} %"
        )
        self._refreshed = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        row, width = module.history[-1], len(str(trainer.max_epochs))
        train, val = (
            module.task.in_brief({name.removeprefix(part): row[name] for name in row})
            for part in ("train_", "val_")
        )
        show(
            f"epoch {row['epoch']:{width}.0f}/{trainer.max_epochs}  {train}  val {val}  "
            f"{row['images_per_second']:,.0f} img/s"
        )
        if row.get("dropped"):
            show(f"  dropped {100 * row['dropped']:.2g} % of the spikes")
        if row["data_wait"] > LONG_WAIT:
            show(f"  {100 * row['data_wait']:.0f} % of the time went into waiting for data")

    def on_train_end(self, *_: Any) -> None:
        if hasattr(self, "bar"):
            self.bar.close()

    def on_exception(self, *_: Any) -> None:
        self.on_train_end()


class MetricsWriter(Callback):
    """Log the loss of steps, and the learning rate and firing rates of epochs; write a CSV file
    with one row per epoch since the start of the run. Warn once of layers that never fire.

    The module logs its other metrics itself.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._firing: dict[str, float] = {}
        self._warned = False

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        if trainer.global_step % LOG_EVERY_STEPS == 0:
            self._log(trainer, {"step_loss": outputs["loss"].item()})

    def on_validation_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        # Here, the network has the weights that are validated, such as their average.
        examples = trainer.datamodule.validation  # type: ignore[attr-defined]
        # Evenly spaced, because the examples of a folder are ordered by class.
        rows = torch.linspace(0, len(examples) - 1, min(OBSERVED, len(examples))).round().long()
        with warnings.catch_warnings():  # of values for which the module raises an error
            warnings.filterwarnings("ignore", ".* has NaN in its ")
            self._firing = firing(module, examples[rows])

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        row = module.history[-1]
        rate = float(f"{float(trainer.optimizers[0].param_groups[0]['lr']):.6g}")
        measured = {"lr": rate, **self._firing}
        self._log(trainer, measured)
        row.update(measured)
        with replacing(self.directory / METRICS) as path, path.open("w", newline="") as file:
            names = dict.fromkeys(name for row in module.history for name in row)
            table = csv.DictWriter(file, names)
            table.writeheader()
            table.writerows(module.history)
        silent = silent_layers(row)
        if silent and not self._warned:
            self._warned = True
            show(
                f"  warning: layers without any spike: {', '.join(silent)}; unless later epochs "
                "have some, lower --threshold, change --decay or --neuron, or add steps "
                "(--num-steps)"
            )

    def _log(self, trainer: pl.Trainer, metrics: dict[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(metrics, trainer.global_step)


def firing(module: Any, examples: Examples) -> dict[str, float]:
    """The share of neurons that fire in a step, and of those that never fire, of each layer in all
    of its calls; only the former if their shapes differ, so that the neurons do."""
    if module.config.on_events or module.processes.time > 1:
        return {}  # the history has the activity of events; a sequence may be shared
    was_training = module.net.training
    module.net.eval()
    batch = contents(examples.to(module.device), packed=False)
    devices = [module.device] if module.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices), record(module.net.net) as recorded:
        module.net(module.encode(batch))
    module.net.train(was_training)
    found = {}
    for name, rate in recorded.rates.items():
        found[f"rate_{name}"] = rate
        silent = [(spikes == 0).all(0).all(0) for spikes in first_outputs(recorded.calls[name])]
        if len({neurons.shape for neurons in silent}) == 1:
            found[f"silent_{name}"] = torch.stack(silent).all(0).float().mean().item()
    return found


def silent_layers(row: EpochMetrics) -> list[str]:
    """Return the names of the layers of which no neuron has fired, by the metrics of an epoch."""
    signs = {"silent_": 1.0, "activity_": 0.0}  # the latter are of event layers
    return [
        name.removeprefix(prefix)
        for name, value in row.items()
        for prefix, sign in signs.items()
        if name.startswith(prefix) and value == sign
    ]


class CheckpointSaver(Checkpoint):
    """Save the last and the best epoch, during long epochs, and when a signal stops the run.

    Lightning calls a `Checkpoint` after all other callbacks at the end of an epoch. Every process
    has one, because saving is collective; only the main process writes.
    """

    def __init__(self, directory: Path, signals: SignalHandler) -> None:
        self.directory, self.signals = directory, signals
        self.processes = signals.processes
        self._saved = time.monotonic()
        self.started = False  # whether a batch has begun, after all of a checkpoint was restored

    def on_train_batch_start(self, *_: Any) -> None:
        self.started = True

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.signals.install()  # replaces Lightning's own handler
        # If one of several processes dies, the others cannot save: saving is collective.
        if self.processes.count > 1:
            self._save(trainer)

    def _save(self, trainer: pl.Trainer, best: bool = False) -> None:
        self._saved = time.monotonic()
        if not self.processes.main:
            trainer.save_checkpoint(self.directory / LAST)  # writes nothing here
            return
        with replacing(self.directory / LAST) as path:
            trainer.save_checkpoint(path)
            # BEST is replaced before LAST: a run resumed from LAST repeats the steps after it, so
            # BEST may be newer than LAST but never older.
            if best:
                with replacing(self.directory / BEST) as copy:
                    shutil.copyfile(path, copy)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        done = index + 1
        # Validation follows the last batch of an epoch; `on_train_epoch_end` stops after it.
        if done == trainer.num_training_batches:
            return
        if self.processes.count == 1 or done % AGREE_EVERY_STEPS == 0:
            self._stop_if_requested(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._save(trainer, best=best_epoch(module.history) is module.history[-1])
        self._stop_if_requested(trainer, saved=True)

    def _stop_if_requested(self, trainer: pl.Trainer, saved: bool = False) -> None:
        # The number of a signal, -1 if saving is due, or -2; the highest of all processes counts.
        due = time.monotonic() - self._saved > SAVE_SECONDS
        request = self.processes.maximum(self.signals.requested or (-1 if due else -2))
        if not saved and request > -2:
            self._save(trainer)
        if request > 0:
            self.signals.requested = request
            self.signals.stop()
