"""The Lightning module: one step of training, validation and test, and what it keeps count of."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor

from spikefuse.nn.encode import direct, poisson
from spikefuse.train.batches import Batch, shifted
from spikefuse.train.config import TrainConfig
from spikefuse.train.randomness import Purpose, reseed

# Where this library keeps what is its own inside a Lightning checkpoint.
KEY = "spikefuse"

Row = dict[str, float]


class Tally:
    """Running mean of the loss and of the accuracy; it stays on the device until it is read."""

    def __init__(self) -> None:
        self.totals: Tensor | None = None  # sum of losses, number of right answers
        self.count = 0

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        correct = (logits.argmax(1) == labels).sum()
        new = torch.stack([loss.detach().double() * len(labels), correct.double()])
        self.totals = new if self.totals is None else self.totals.to(new.device) + new
        self.count += len(labels)

    def mean(self) -> tuple[float, float]:
        """(loss, accuracy), the accuracy from 0 to 1; waits for the device."""
        loss, correct = [0.0, 0.0] if self.totals is None else self.totals.tolist()
        return loss / max(self.count, 1), correct / max(self.count, 1)

    def state(self) -> dict[str, Any]:
        return {
            "totals": None if self.totals is None else self.totals.tolist(),
            "count": self.count,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Tally:
        tally = cls()
        if state["totals"] is not None:
            tally.totals = torch.tensor(state["totals"], dtype=torch.float64)
        tally.count = state["count"]
        return tally


class Classifier(pl.LightningModule):
    """A spiking network that classifies images by its mean output over time.

    `history` has one row per finished epoch. A checkpoint holds it, the tally of the epoch that
    has begun, and the configuration, besides what Lightning saves.
    """

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.config = config
        reseed(config.seed, Purpose.WEIGHTS)
        self.net = config.make_network()
        self.history: list[Row] = []
        self._row: Row = {}
        self.tally, self.eval_tally = Tally(), Tally()
        self._clock, self._clock_count = 0.0, 0

    def encode(self, pixels: Tensor) -> Tensor:
        """Bytes `[B, C, H, W]` to the network's input `[T, B, C, H, W]`."""
        encoding = poisson if self.config.encoding == "poisson" else direct
        return encoding(pixels / 255, self.config.num_steps)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.net(self.encode(pixels)).float().mean(0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.config.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), self.config.lr, momentum=0.9)
        return torch.optim.Adam(self.parameters(), self.config.lr)

    # Training

    def on_train_epoch_start(self) -> None:
        self.tally = Tally()

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        # Not at the start of the epoch, which a run resumed within one does not see.
        if not self._clock:
            self._clock, self._clock_count = time.perf_counter(), self.tally.count

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        reseed(self.config.seed, Purpose.STEP, self.global_step)
        pixels, labels = batch
        logits = self(shifted(pixels, self.config.shift))
        loss = F.cross_entropy(logits, labels)
        self.tally.add(loss, logits, labels)
        return loss

    def images_per_second(self) -> float:
        """Training speed since the epoch, or what was resumed of it, began."""
        seconds = time.perf_counter() - self._clock
        return (self.tally.count - self._clock_count) / seconds

    # Validation and test

    def on_validation_epoch_start(self) -> None:
        loss, accuracy = self.tally.mean()
        self._row = {
            "epoch": self.current_epoch + 1,
            "step": self.global_step,
            "train_loss": loss,
            "train_accuracy": accuracy,
            "images_per_second": self.images_per_second(),
        }
        self._clock = 0.0
        self.eval_tally = Tally()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        loss, accuracy = self.eval_tally.mean()
        self.history.append({**self._row, "val_loss": loss, "val_accuracy": accuracy})

    def on_test_epoch_start(self) -> None:
        self.eval_tally = Tally()

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, batch_idx)

    def _evaluate(self, batch: Batch, batch_idx: int) -> None:
        reseed(self.config.seed, Purpose.EVALUATION, batch_idx)
        pixels, labels = batch
        logits = self(pixels)
        self.eval_tally.add(F.cross_entropy(logits, labels), logits, labels)

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[KEY] = {
            "config": self.config.to_dict(),
            "history": self.history,
            "tally": self.tally.state(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.history = [dict(row) for row in checkpoint[KEY]["history"]]
        self.tally = Tally.from_state(checkpoint[KEY]["tally"])


def best_row(history: list[Row]) -> Row:
    """The epoch with the highest validation accuracy; among equals the lowest loss, then the
    first."""
    return max(history, key=lambda row: (row["val_accuracy"], -row["val_loss"]))
