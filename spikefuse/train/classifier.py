"""The Lightning module: one step of training, validation and test, and what it keeps count of."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from spikefuse.data import DATASETS, random_flip, random_shift
from spikefuse.distributed import gather_steps, shard_time
from spikefuse.nn import Events
from spikefuse.nn.encode import direct, poisson
from spikefuse.train import optimize
from spikefuse.train.activity import Activity
from spikefuse.train.batches import Batch
from spikefuse.train.config import TrainConfig
from spikefuse.train.graph import GraphedStep
from spikefuse.train.objective import learning_rate, readout
from spikefuse.train.processes import Processes
from spikefuse.train.randomness import Purpose, reseed

# Where this library keeps what is its own inside a Lightning checkpoint.
KEY = "spikefuse"

Row = dict[str, float]
LOG_EVERY_STEPS = 10
WHOLE = slice(None)


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

    def over(self, processes: Processes, device: torch.device) -> Tally:
        """That of all processes together, which all have to ask for it."""
        if processes.count == 1:
            return self
        totals = torch.zeros(2, dtype=torch.float64) if self.totals is None else self.totals
        count = torch.tensor([float(self.count)], dtype=torch.float64, device=device)
        # Processes with steps of the same samples count them all.
        values = processes.sum(torch.cat([totals.to(device), count])) / processes.time
        tally = Tally()
        tally.totals, tally.count = values[:2], int(values[2])
        return tally

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
    """A spiking network that classifies images, or event data, by its output over time.

    `history` has one row per finished epoch. A checkpoint holds it, the tally of the epoch that
    has begun, and the configuration, besides what Lightning saves. Of several processes each
    gets the same batches, makes the same random choices, and computes its share.

    Args:
        config: of the run.
        processes: those of the run.
    """

    def __init__(self, config: TrainConfig, processes: Processes | None = None) -> None:
        super().__init__()
        # One training step may hold several backward passes, or be the replay of a CUDA graph.
        self.automatic_optimization = False
        self.config = config
        self.processes = Processes() if processes is None else processes
        reseed(config.seed, Purpose.WEIGHTS)
        self.net = config.make_network()
        self._axis: DeviceMesh | None = None
        self.activity = Activity(self.net.net, config.capacity)
        self.history: list[Row] = []
        self._row: Row = {}
        self.tally, self.eval_tally = Tally(), Tally()
        self._clock, self._clock_count, self._waited = 0.0, 0, 0.0
        self._graph: GraphedStep | None = None

    def encode(self, inputs: Tensor, share: slice = WHOLE) -> Tensor | Events:
        """Bytes of a batch to the network's input of a share of it, `[T, B, ...]`: images
        `[B, C, H, W]` by the encoding, event data `[B, T, ...]`, which has a time dimension
        already, as it is. A network on events gets them, of event data from packed frames
        `[B, T, S]`."""
        if DATASETS[self.config.dataset].kind == "events":
            frames = inputs[share].transpose(0, 1)
            if self.config.on_events:
                return Events.from_bits(frames, math.prod(DATASETS[self.config.dataset].shape))
            return frames.to(torch.float32, memory_format=torch.contiguous_format)
        encoding = poisson if self.config.encoding == "poisson" else direct
        x = encoding(inputs / 255, self.config.num_steps)[:, share]
        return Events.from_dense(x) if self.config.on_events else x

    def augment(self, inputs: Tensor) -> Tensor:
        """Shift and mirror at random, from PyTorch's own generator of the device, which is the one
        that a CUDA graph reads anew at each replay."""
        generator = torch.default_generator
        if inputs.is_cuda:
            generator = torch.cuda.default_generators[inputs.get_device()]
        if self.config.shift:
            inputs = random_shift(inputs, self.config.shift, generator)
        return random_flip(inputs, generator) if self.config.flip else inputs

    def forward(self, inputs: Tensor) -> Tensor:
        return readout(self.outputs(self.encode(inputs)), self.config.loss)

    def share_time(self, mesh: DeviceMesh, chunks: int) -> None:
        """Let this process compute its time steps only, from now on."""
        self._axis = mesh["time"]
        shard_time(self.net, self._axis, chunks)

    def alone(self) -> None:
        """From now on this process works without the others, for evaluation."""
        self.processes, self._axis, self.net.passing = Processes(), None, None

    def outputs(self, x: Tensor | Events) -> Tensor:
        """Those of the network, `[T, B, ...]`, in all processes that share their time."""
        if self._axis is None or isinstance(x, Events):
            return self.net(x)
        return gather_steps(self.net(x[self.processes.steps(len(x))]), self._axis, len(x))

    def configure_optimizers(self) -> Optimizer:
        return optimize.make_optimizer(self.config, self.parameters(), self.device)

    # Training

    def on_train_start(self) -> None:
        optimize.settle(self._optimizer())
        if self.config.cuda_graph:
            self._graph = GraphedStep(self._step, self._optimizer())

    def on_train_end(self) -> None:
        self._graph = None  # and its memory

    def on_train_epoch_start(self) -> None:
        self.tally = Tally()
        self.activity.restart()

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        # Not at the start of the epoch, which a run resumed within one does not see.
        if not self._clock:
            self._clock, self._clock_count = time.perf_counter(), self.tally.count
            self._waited = 0.0

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        reseed(self.config.seed, Purpose.STEP, self.global_step)
        inputs, labels = batch
        optimizer = self.optimizers(use_pl_optimizer=True)
        steps = int(self.trainer.num_training_batches)
        rate = learning_rate(self.config, self.global_step, steps)
        optimize.set_learning_rate(self._optimizer(), rate)
        if self._graph is None:
            loss, logits, shown = self._gradients(inputs, labels)
            optimizer.step()  # type: ignore[union-attr]
        else:
            loss, logits, shown = self._graph(optimizer, inputs, labels)
            loss = loss.clone()  # the next replay overwrites it
        self.tally.add(loss, logits, shown)
        if self.processes.count > 1 and (self.global_step % LOG_EVERY_STEPS) == 0:
            loss = self.processes.sum(loss) / self.processes.count
        return loss

    def _gradients(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, the logits and the labels of this process's share of a batch."""
        self._optimizer().zero_grad()
        share = self.processes.share(len(labels))
        x = self.encode(self.augment(inputs), share)
        net = self.net if self._axis is None else self.outputs
        loss, logits = optimize.gradients(
            net, x, labels[share], self.config, self._backward, self._penalty
        )
        self.activity.count()
        return loss, logits, labels[share]

    def _penalty(self) -> Tensor | None:
        penalty, weight = self.activity.penalty(), self.config.activity_weight
        return None if penalty is None or weight is None else weight * penalty

    def _backward(self, loss: Tensor, last: bool) -> None:
        block = getattr(self.trainer.strategy, "block_backward_sync", None)
        with contextlib.nullcontext() if last or block is None else block():
            self.manual_backward(loss)

    def _step(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A whole step without Lightning's part in it, for a CUDA graph."""
        result = self._gradients(inputs, labels)
        self.on_before_optimizer_step(self._optimizer())
        self._optimizer().step()
        return result

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        # Here a float16 gradient has been unscaled.
        optimize.clip(optimizer, self.config.clip)

    def _optimizer(self) -> Optimizer:
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, Optimizer)
        return optimizer

    def images_per_second(self) -> float:
        """Training speed of all processes since the epoch, or what was resumed of it, began."""
        seconds = time.perf_counter() - self._clock
        return (self.tally.count - self._clock_count) * self.processes.data / seconds

    def waited(self) -> float:
        """Share of that time in which this process waited for data, from 0 to 1."""
        return self._waited / (time.perf_counter() - self._clock)

    def wait(self, seconds: float) -> None:
        """Count time spent waiting for data."""
        self._waited += seconds

    # Validation and test

    def on_validation_epoch_start(self) -> None:
        # Waits for the device, whose time counts too.
        loss, accuracy = self.tally.over(self.processes, self.device).mean()
        self._row = {
            "epoch": self.current_epoch + 1,
            "step": self.global_step,
            "train_loss": loss,
            "train_accuracy": accuracy,
            "images_per_second": self.images_per_second(),
            "data_wait": self.waited(),
            **self.activity.row(self.processes, self.device),
        }
        self._clock = 0.0
        self.eval_tally = Tally()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        loss, accuracy = self.eval_tally.over(self.processes, self.device).mean()
        self.history.append({**self._row, "val_loss": loss, "val_accuracy": accuracy})

    def on_test_epoch_start(self) -> None:
        self.eval_tally = Tally()

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, batch_idx)

    def _evaluate(self, batch: Batch, batch_idx: int) -> None:
        reseed(self.config.seed, Purpose.EVALUATION, batch_idx)
        inputs, labels = batch
        share = self.processes.share(len(labels))
        labels = labels[share]
        if len(labels) == 0:  # fewer images than processes
            return
        logits = readout(self.outputs(self.encode(inputs, share)), self.config.loss)
        self.eval_tally.add(F.cross_entropy(logits, labels), logits, labels)

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[KEY] = {
            "config": self.config.to_dict(),
            "history": self.history,
            "step": self.global_step,
            "tally": self.tally.over(self.processes, self.device).state(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.history = [dict(row) for row in checkpoint[KEY]["history"]]
        if self.processes.main:  # the others begin at nothing: the sum is what was saved
            self.tally = Tally.from_state(checkpoint[KEY]["tally"])


def best_row(history: list[Row]) -> Row:
    """The epoch with the highest validation accuracy; among equals the lowest loss, then the
    first."""
    return max(history, key=lambda row: (row["val_accuracy"], -row["val_loss"]))
