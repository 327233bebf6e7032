"""The Lightning module: training, validation and test steps, and their metrics."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from spikefuse.distributed import gather_steps, shard_time
from spikefuse.nn import Events
from spikefuse.train import batches, optimize, own
from spikefuse.train.activity import ActivityMonitor, RateMonitor
from spikefuse.train.batches import WHOLE, Batch
from spikefuse.train.checkpoint import KEY, EpochMetrics, entry, same_types
from spikefuse.train.config import TrainConfig
from spikefuse.train.conflicts import constant_norm, ignored_neuron
from spikefuse.train.extras import optional_callbacks
from spikefuse.train.fields import ConfigError
from spikefuse.train.hooks import CompletesHooks, required
from spikefuse.train.optimize import learning_rate
from spikefuse.train.processes import Processes
from spikefuse.train.seeding import Purpose, reseed, reseeded
from spikefuse.train.tasks import Totals
from spikefuse.transforms.graph_step import DDP_WARMUP, GraphStep, graph_step

LOG_EVERY_STEPS = 10
LIGHTNING_PRECISION = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}


class LearningRate(pl.Callback):
    """Set the learning rate of a step before other callbacks read it, such as Lightning's
    `LearningRateMonitor`: hooks of the module run after theirs."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if isinstance(module, TrainingModule):  # the trainer may fit others later
            module.set_learning_rate()


class TrainingModule(CompletesHooks, pl.LightningModule):
    """A spiking network that learns the task of `config` from images, event data or series.

    A subclass may override `make_network`, `augment`, `encode`, `loss`, `configure_optimizers` and
    any hook of Lightning; one that does not call `super()` runs before that of this class.
    Optimization is manual: `config.clip` and `config.accumulate` take the place of the trainer's
    options. On a GPU the step, from `augment` to the optimizer, is recorded as a CUDA graph where
    possible (`config.graph_obstacle`); a step that waits for the GPU or draws random numbers on the
    CPU runs eagerly, with a warning that names its line.

    Each epoch with a validation logs train_loss, train_accuracy, val_loss and val_accuracy, and a
    test test_loss and test_accuracy, for Lightning's loggers and callbacks; of values mae and r2 in
    place of accuracy, such as val_r2. `history` has one entry per such epoch. In addition to what
    Lightning saves, a checkpoint holds the history, the totals of the current epoch, and the
    configuration. All processes receive the same batches and make the same random choices; each
    computes its share of a batch.

    `spikefuse train` and `sf.train.fit` also scale the initial weights of an event-mlp, so that a
    share `config.activity` of its neurons fires. In a trainer of your own, call
    `sf.nn.scale_to_rate` on `module.net.net` first.

    Args:
        config: settings of the run.
        processes: processes of the run; None for this one only.
    """

    def __init__(self, config: TrainConfig, processes: Processes | None = None) -> None:
        super().__init__()
        self._called_hooks = set()
        # A training step may have several backward passes, or be the replay of a CUDA graph.
        self.automatic_optimization = False
        self.config = config
        self.processes = Processes() if processes is None else processes
        reseed(config.seed, Purpose.WEIGHTS)
        self.neurons_made = 0
        self.net: Any = self.make_network()
        body = own.body_of(self.net)
        if self._encodes:
            for conflict in constant_norm(config, self.net, self.processes.data):
                raise ConfigError(conflict)
        self._axis: DeviceMesh | None = None
        self.activity = ActivityMonitor(body, config.capacity)
        self._rates = RateMonitor(body) if config.rate_penalty else None
        if self._rates is not None and self._rates.num_layers == 0:
            raise ConfigError(
                f"rate_penalty is given, but {config.model} has no neurons of spikefuse: remove it"
            )
        self.history: list[EpochMetrics] = []
        self._row: EpochMetrics = {}
        self.task = config.make_task()
        self.totals, self.eval_totals = Totals(self.task), Totals(self.task)
        self._clock, self._clock_count, self._waited, self._batch_end = 0.0, 0, 0.0, 0.0
        self.graph: GraphStep | None = None  # of the training step
        self._ratios: list[float] = []  # of the learning rates of groups of parameters
        self._loaded_rate: float | None = None  # the setting of the checkpoint
        self._sets_rate = True  # at the next step

    def make_network(self) -> torch.nn.Module:
        """Build the network, whose outputs are `[T, B, classes]`, or `[T, B, K]` for K values.

        It is a `Temporal`, or another module around some, which for `config.tbptt` takes `state`
        and `return_state` as `Temporal` does.

        Checkpoints of a subclass that overrides this are loaded by Lightning's
        `load_from_checkpoint(path, config=config)`, not by `spikefuse.load`, which knows the model
        that `config` names.

        Raises:
            ConfigError: its builder ignores the neuron, of which options are given.
        """
        net = self.config.make_network(self._make_neuron)
        for conflict in () if self.neurons_made else ignored_neuron(self.config):
            raise ConfigError(conflict)
        return net

    def _make_neuron(self) -> torch.nn.Module:
        self.neurons_made += 1
        return self.config.make_neuron()

    def encode(self, inputs: Tensor, share: slice = WHOLE) -> Tensor | Events:
        """Convert a batch to the network's input `[T, B, ...]`.

        Args:
            inputs: images `[B, C, H, W]`, event frames or series `[B, T, ...]`, or for event models
                packed event frames `[B, T, S]`.
            share: the samples to return; random numbers are drawn for the whole batch.
        """
        return batches.encode(inputs, self.config, share)

    def augment(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Change a batch at random, and with it the labels where examples are mixed.

        Args:
            inputs: as in `encode`.
            labels: classes `[B]`, or targets of another task.

        Returns:
            Inputs for `encode`, and the labels or class probabilities `[B, classes]`, float32.
        """
        return batches.augment(inputs, labels, self.config, self.task.outputs)

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Compute the training loss, a scalar.

        Args:
            outputs: `[T, B, classes]`, or a chunk of it with `config.tbptt`.
            labels: as `augment` returns them: classes `[B]` or class probabilities `[B, classes]`,
                values `[B, K]`, or for each step of the outputs `[B, T]` or `[B, T, K]`.
        """
        return self.task.loss(outputs, labels)

    def forward(self, inputs: Tensor) -> Tensor:
        self._check_inputs(inputs)
        return self.task.predict(self.outputs(self.encode(inputs)))

    def share_time(self, mesh: DeviceMesh, chunks: int) -> None:
        """Compute only this process's time steps from now on."""
        self._axis = mesh["time"]
        shard_time(self.net, self._axis, chunks)

    def detach_processes(self) -> None:
        """Work without the other processes from now on, for evaluation."""
        self.processes, self._axis, self.net.passing = Processes(), None, None

    def outputs(self, x: Tensor | Events) -> Tensor:
        """Return the network's outputs `[T, B, ...]`, gathered from all time ranks."""
        if self._axis is None or isinstance(x, Events):
            return self.net(x)
        return gather_steps(self.net(x[self.processes.steps(len(x))]), self._axis, len(x))

    def configure_optimizers(self) -> Any:
        """Create the optimizer of `config`, whose schedule sets its learning rate at each step.

        A subclass may return one optimizer of its own, alone for that schedule, or with schedulers
        in a form that Lightning accepts: they step after each epoch, or with `"interval": "step"`
        after each optimizer step, once in `"frequency"` of them. The schedule sets `config.lr`; a
        group of parameters with a learning rate of its own keeps the ratio of that rate to the
        optimizer's.
        """
        return optimize.make_optimizer(self.config, self, self.device)

    @required
    def configure_callbacks(self) -> list[pl.Callback]:
        """Return the callbacks for `config.patience` and `config.ema`.

        Lightning adds them to the trainer's, where they replace a plain `EarlyStopping` and
        `WeightAveraging`. Those that a subclass returns come after them.
        """
        return optional_callbacks(self.config)

    # Training

    @required
    def on_fit_start(self) -> None:
        if self.trainer.world_size != self.processes.count:
            raise ConfigError(
                f"the trainer has {self.trainer.world_size} processes, but the module has "
                f"{self.processes.count}: use spikefuse train under torchrun, or devices=1"
            )
        expected = LIGHTNING_PRECISION[self.config.precision]
        if self.trainer.precision != expected:
            raise ConfigError(
                f"the trainer has precision {self.trainer.precision!r}, and the module "
                f"{self.config.precision!r}: choose Trainer(precision={expected!r}), or another in "
                "TrainConfig"
            )
        epochs = self.config.epochs
        trial = bool(self.trainer.fast_dev_run)  # type: ignore[attr-defined]
        if self.config.schedule != "constant" and not (trial or self.trainer.max_epochs == epochs):
            raise ConfigError(
                f"the trainer has max_epochs {self.trainer.max_epochs}, and the schedule "
                f"{self.config.schedule} is for {epochs}: choose Trainer(max_epochs={epochs}), or "
                "other epochs in TrainConfig"
            )
        if not self._schedulers():  # before a checkpoint restores the current rates
            optimize.check_rate(self._optimizer(), self.config.lr)
            self._ratios = optimize.rate_ratios(self._optimizer())
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, LearningRate) for callback in callbacks):
            callbacks.insert(0, LearningRate())

    @required
    def on_train_start(self) -> None:
        optimize.adapt_state(self._optimizer())
        is_restored = self.trainer.ckpt_path is not None
        self._sets_rate = not is_restored or self._loaded_rate != self.config.lr
        optimize.check_schedulers(self.trainer.lr_scheduler_configs)
        if not self.config.graph_obstacle(self.device, self.processes.count):
            self.graph = graph_step(
                self._step,
                self,
                self._optimizer(),
                warmup=DDP_WARMUP if self.processes.count > 1 else 3,
                fallback=self.config.cuda_graph is None,
            )

    @required
    def on_train_end(self) -> None:
        if self.graph is not None:
            self.graph.reset()  # releases its memory
            self.graph = None

    @required
    def on_train_epoch_start(self) -> None:
        self.totals = Totals(self.task)
        self.activity.restart()

    @required
    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        now = time.perf_counter()
        # A run resumed within an epoch does not call `on_train_epoch_start`.
        if not self._clock:
            self._clock, self._clock_count, self._waited = now, self.totals.count, 0.0
        else:
            self._waited += now - self._batch_end

    @required
    def on_train_batch_end(self, *_: Any) -> None:
        self._batch_end = time.perf_counter()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        reseed(self.config.seed, Purpose.STEP, self.global_step)
        inputs, labels = batch
        self._check_batch(inputs, labels, batch_idx)
        optimizer = self.optimizers(use_pl_optimizer=True)
        if self.graph is None:
            loss, predictions, shown = self.gradients(inputs, labels)
            optimizer.step()  # type: ignore[union-attr]
        else:
            optimizer._on_before_step()  # type: ignore[union-attr]
            loss, predictions, shown = self.graph(inputs, labels)
            optimizer._on_after_step()  # type: ignore[union-attr]
        is_last = batch_idx + 1 == self.trainer.num_training_batches
        epoch = self.current_epoch if is_last or self.trainer.is_last_batch else None
        optimize.step_schedulers(self.trainer.lr_scheduler_configs, batch_idx, epoch)
        counted = None
        if self.processes.data > 1:  # whose losses are parts of the mean over the whole batch
            counted = self.task.num_samples(labels) / self.processes.data
        self.totals.add(predictions, shown, loss, counted)
        if self.processes.count > 1 and (self.global_step % LOG_EVERY_STEPS) == 0:
            loss = self.processes.sum(loss) / self.processes.count
        return loss

    def gradients(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute gradients of this process's share of a batch.

        Args:
            inputs: the whole batch, as in `encode`.
            labels: classes `[B]`, or targets of another task.

        Returns:
            The loss, predictions `[B, classes]` and labels of the share.
        """
        self._optimizer().zero_grad()
        share = self.processes.share(len(labels))
        inputs, labels = self.augment(inputs, labels)
        x = self.encode(inputs, share)
        net = self.net if self._axis is None else self.outputs
        whole = labels, self.processes.data
        loss, predictions = optimize.gradients(
            net, x, labels[share], self.config, self._loss, self._backward, whole, self._penalty
        )
        self.activity.count()
        return loss, predictions, labels[share]

    @property
    def _encodes(self) -> bool:
        """Whether `encode` is ours, not one of the user's."""
        return getattr(self.encode, "__func__", None) is TrainingModule.encode

    def _check_inputs(self, inputs: Tensor) -> None:
        """Raise ConfigError for images other than bytes `[B, C, H, W]`, which `encode` divides by
        255."""
        if not self._encodes or self.config.data.kind != "images":
            return  # inputs may be of any type
        if inputs.dtype != torch.uint8:
            raise ConfigError(
                f"the images are {inputs.dtype}: expected bytes, torch.uint8, which `encode` "
                "divides by 255; or override `encode`"
            )
        shape = [*inputs.shape]
        if len(shape) != 4 or (shape[3] in (1, 3) and shape[1] not in (1, 3)):
            raise ConfigError(
                f"the images are {shape}: expected [B, C, H, W]; or override `encode`"
            )

    def _check_batch(self, inputs: Tensor, labels: Tensor, batch_idx: int) -> None:
        self._check_inputs(inputs)
        readers = "loss", "augment", "gradients"  # others may take labels of other shapes
        if all(getattr(type(self), name) is getattr(TrainingModule, name) for name in readers):
            self.task.check(labels)
            if batch_idx == 0 or labels.device.type == "cpu":  # others would wait for a GPU
                self.task.check_values(labels)

    def set_learning_rate(self) -> None:
        """Set the rate of the schedule where it changes, so that a user may change a constant."""
        if self._schedulers():
            return
        steps = optimize.steps_per_epoch(self.config, self.trainer.num_training_batches)
        step = self.global_step
        rate = learning_rate(self.config, step, steps)
        # A callback may have added groups.
        self._ratios += optimize.rate_ratios(self._optimizer(), len(self._ratios))
        before = learning_rate(self.config, max(step - 1, 0), steps)
        if self._sets_rate or step == 0 or rate != before:
            optimize.set_learning_rate(self._optimizer(), rate, self._ratios)
            self._sets_rate = False

    def _loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        config, num = self.config, self.task.outputs
        if outputs.ndim != 3 or outputs.shape[1:] != (len(labels), num):
            what = "classes" if self.task.of_classes else "values"
            raise ConfigError(
                f"the model {config.model} has outputs {list(outputs.shape)}: expected [T, "
                f"{len(labels)}, {num}], one for each of the {num} {what}"
            )
        return self.loss(outputs, labels)

    def _penalty(self) -> Tensor | None:
        """Compute the penalty of the most recent call of the network: a model has one at most."""
        if self._rates is not None:
            penalty, weight = self._rates.penalty(), self.config.rate_penalty
        elif weight := self.config.activity_weight or 0.0:
            penalty = self.activity.penalty(self.processes)
        else:
            return None
        return None if penalty is None else weight * penalty

    def _backward(self, loss: Tensor, last: bool) -> None:
        block = getattr(self.trainer.strategy, "block_backward_sync", None)
        with contextlib.nullcontext() if last or block is None else block():
            self.manual_backward(loss)

    def _step(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run a whole step without Lightning, for a CUDA graph."""
        result = self.gradients(inputs, labels)
        self.on_before_optimizer_step(self._optimizer())
        self._optimizer().step()
        return result

    @required
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        # float16 gradients are unscaled by now.
        optimize.clip(optimizer, self.config.clip)

    def _optimizer(self) -> Optimizer:
        optimizer = self.optimizers(use_pl_optimizer=False)
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"configure_optimizers has returned {len(optimizer)} optimizers: expected one"
            )
        return optimizer

    def _schedulers(self) -> list[Any]:
        """Return the schedulers of a subclass."""
        schedulers = self.lr_schedulers()  # None, one, or a list
        return schedulers if isinstance(schedulers, list) else [schedulers] if schedulers else []

    def images_per_second(self) -> float:
        """Return the training speed of all processes since the epoch began or was resumed."""
        seconds = time.perf_counter() - self._clock
        return (self.totals.count - self._clock_count) * self.processes.data / seconds

    def data_wait(self) -> float:
        """Return the fraction of the training time spent waiting for data."""
        return self._waited / (time.perf_counter() - self._clock)

    # Validation and test

    @required
    def on_validation_epoch_start(self) -> None:
        # Reading the totals first waits for the device, which is part of the measured time.
        metrics = self.totals.reduced(self.processes, self.device).mean()
        self._row = {
            "epoch": self.current_epoch + 1,
            "step": self.global_step,
            **{f"train_{name}": value for name, value in metrics.items()},
            "images_per_second": self.images_per_second(),
            "data_wait": self.data_wait(),
            **self.activity.row(self.processes, self.device),
        }
        self._clock = 0.0
        self.eval_totals = Totals(self.task)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.test_step(batch, batch_idx)

    @required
    def on_validation_epoch_end(self) -> None:
        if self.trainer.sanity_checking:
            return
        metrics = self.eval_totals.reduced(self.processes, self.device).mean()
        row = {f"val_{name}": value for name, value in metrics.items()}
        if self.trainer.state.fn == "fit":
            row = {**self._row, **row}
            optimize.check_finite(self.net, row)
            self.history.append(row)
        self.log_dict({name: row[name] for name in row if name not in ("epoch", "step")})

    @required
    def on_test_epoch_start(self) -> None:
        self.eval_totals = Totals(self.task)

    @required
    def on_test_epoch_end(self) -> None:
        metrics = self.eval_totals.reduced(self.processes, self.device).mean()
        self.log_dict({f"test_{name}": value for name, value in metrics.items()})

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return predictions for inputs, or for inputs and labels."""
        predictions: Tensor = self(batch[0] if isinstance(batch, list | tuple) else batch)
        return predictions

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to `eval_totals`."""
        inputs, labels = batch
        if batch_idx == 0 and self.eval_totals.count:
            raise ConfigError(
                "a second loader begins, and the metrics of each would be those of all examples: "
                "give one, and call trainer.validate or trainer.test for each of the others"
            )
        self._check_batch(inputs, labels, batch_idx)
        share = self.processes.share(len(labels))
        labels = labels[share]
        if len(labels) == 0:  # the last batch may have fewer samples than there are processes
            return
        with reseeded(self.config.seed, Purpose.EVALUATION, batch_idx, self.device):
            predictions = self.task.predict(self.outputs(self.encode(inputs, share)))
        self.eval_totals.add(predictions, labels)

    # Checkpoints

    @required
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        totals = self.totals.reduced(self.processes, self.device)
        examples = getattr(self.trainer, "datamodule", None)
        checkpoint[KEY] = {
            **entry(self.config, self.history),
            "step": self.global_step,
            "labels": getattr(examples, "label_checksums", None),
            "tally": {"totals": totals.sums.tolist(), "count": totals.count},
        }

    @required
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        loops = {} if self._trainer is None else self.trainer.fit_loop.state_dict()
        if not same_types(checkpoint["loops"]["fit_loop"], loops):
            raise TypeError("a counter of the training loop has another type")
        self.history = [dict(row) for row in checkpoint[KEY]["history"]]
        self._loaded_rate = checkpoint[KEY]["config"]["lr"]
        if self.processes.main:  # totals are summed over processes: the others start from zero
            tally = checkpoint[KEY]["tally"]
            self.totals = Totals(self.task, tally["totals"], tally["count"])
