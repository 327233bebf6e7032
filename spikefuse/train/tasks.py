"""What a run learns: the losses, the metrics and the predictions of each task.

Shape legend: T time steps, B samples, K outputs: a network has one for each class, or for each
value of a target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spikefuse.nn.losses import IGNORED
from spikefuse.train.fields import ConfigError

if TYPE_CHECKING:
    from spikefuse.train.processes import Processes

CRITERIA: dict[str, Callable[..., Tensor]] = {
    "cross-entropy": F.cross_entropy,
    "mse": F.mse_loss,
    "mae": F.l1_loss,
    "huber": F.huber_loss,
}
# The criteria of each task, the default first.
TASKS = {
    "classification": ("cross-entropy",),
    "regression": ("mse", "mae", "huber"),
    "sequence": ("mse", "mae", "huber", "cross-entropy"),
}
# The sum of class probabilities, which may be in half precision, differs from 1 by at most this.
SUM_TOLERANCE = 0.01
# Variances of targets below this share of their mean square are rounding.
LEAST_VARIANCE = 1e-12


@dataclass(frozen=True)
class Task:
    """What the outputs of a network `[T, B, K]` are compared with, and how.

    Steps and samples of class -100 do not count.

    | name | targets | predictions |
    |---|---|---|
    | classification | classes `[B]` | logits `[B, K]` |
    | regression | values `[B, K]` | values `[B, K]` |
    | sequence | values `[B, T, K]`, or classes `[B, T]` | values or logits `[B, T, K]` |

    Args:
        name: one of `TASKS`.
        criterion: one of those of the task.
        steps: outputs that count, one of `choices.LOSSES`: their mean, the last or every one.
        outputs: K.
        smoothing: fraction of the target spread over all classes in training, from 0 to 1.
    """

    name: str
    criterion: str
    steps: str
    outputs: int
    smoothing: float = 0.0

    @property
    def of_classes(self) -> bool:
        return self.criterion == "cross-entropy"

    def are_classes(self, targets: Tensor) -> bool:
        """Whether targets are numbers of classes, neither values nor class probabilities."""
        return self.of_classes and not targets.is_floating_point()

    @property
    def per_step(self) -> bool:
        return self.name == "sequence"

    def target(self, num_samples: int, num_steps: int) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return the dtype and the shape of the targets of some samples."""
        shape = (num_samples, num_steps) if self.per_step else (num_samples,)
        return (torch.int64, shape) if self.of_classes else (torch.float32, (*shape, self.outputs))

    def check(self, targets: Tensor) -> None:
        """Raise a ConfigError unless a batch of targets has a shape of the table above."""
        expected: list[str | int] = ["B", "T"] if self.per_step else ["B"]
        what, is_whole = "whole numbers of classes", not targets.is_floating_point()
        if not self.of_classes:
            expected, what, is_whole = [*expected, self.outputs], "values", True
        elif not is_whole and not self.per_step:
            expected, is_whole = [*expected, self.outputs], True
            what = "probabilities of classes; classes themselves are whole numbers"
        pairs = zip(expected, targets.shape, strict=False)
        fits = len(expected) == targets.ndim and all(n in ("B", "T", size) for n, size in pairs)
        if not (fits and is_whole):
            raise ConfigError(
                f"the labels of the task {self.name} are {targets.dtype} "
                f"{list(targets.shape)}: expected [{', '.join(map(str, expected))}], {what}"
            )

    def check_values(self, targets: Tensor) -> None:
        """Raise a ConfigError for targets that are neither classes nor class probabilities, where
        the task is one of classes; synchronizes with the device.

        Args:
            targets: that `check` takes.
        """
        if self.are_classes(targets):
            counted = targets.long()[targets.long() != IGNORED]
            low, high = counted.aminmax() if len(counted) else (0, 0)
            if low < 0 or high >= self.outputs:
                raise ConfigError(
                    f"the labels of the task {self.name} are from {int(low)} to {int(high)}: "
                    f"expected 0 to {self.outputs - 1}, for {self.outputs} outputs, or {IGNORED} "
                    "for what does not count"
                )
        elif self.of_classes:
            sums = targets.float().sum(-1)
            if not (((sums - 1).abs() <= SUM_TOLERANCE) & (targets >= 0).all(-1)).all():
                raise ConfigError(
                    f"the labels of the task {self.name}, {targets.dtype} {list(targets.shape)}, "
                    f"have sums from {sums.min():g} to {sums.max():g} and values from "
                    f"{targets.min():g}: expected class probabilities, which are at least 0 and "
                    "have the sum 1; or override `loss`"
                )

    def predict(self, outputs: Tensor) -> Tensor:
        """Return predictions, float32: for each step, the mean over time, or the last step."""
        if self.per_step:
            return outputs.transpose(0, 1).float()
        last = self.steps == "last"
        return (outputs[-1] if last else outputs.mean(0, dtype=torch.float32)).float()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the training loss of outputs over time, a float32 scalar.

        With the criterion $C$, averaged over samples: $C(\\frac1T\\sum_t y_t)$ of the mean,
        $C(y_T)$ of the last step, $\\frac1T\\sum_t C(y_t)$ of every step.

        Source of the last: Deng et al., "Temporal Efficient Training of Spiking Neural Network via
        Gradient Re-weighting", ICLR 2022, equation 9.

        Args:
            outputs: `[T, B, K]`.
            targets: as in the table above, or class probabilities `[B, K]`.
        """
        if self.steps != "every":
            return self._criterion(self.predict(outputs), targets, self.smoothing)
        every = targets.expand(len(outputs), *targets.shape)
        steps = targets.transpose(0, 1) if self.per_step else every
        return self._criterion(outputs.flatten(0, 1).float(), steps.flatten(0, 1), self.smoothing)

    def _criterion(self, predictions: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        options = {"label_smoothing": smoothing} if self.of_classes else {}
        # A user's batches may have other types, such as those of NumPy.
        targets = targets.long() if self.are_classes(targets) else targets.to(predictions.dtype)
        return CRITERIA[self.criterion](predictions, targets, **options)

    def evaluate(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss of predictions, without smoothing."""
        if self.of_classes and self.per_step:
            predictions, targets = predictions.flatten(0, 1), targets.flatten(0, 1)
        return self._criterion(predictions, targets, 0.0)

    # Metrics

    @property
    def num_statistics(self) -> int:
        return 2 if self.of_classes else 1 + 3 * self.outputs

    def statistics(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Return sums over samples from which metrics follow, float64 `[num_statistics]`.

        The correct class of a mixed example is the one with the largest share. Class -100 is never
        correct, and the last sum counts the samples of that class.
        """
        if self.of_classes:
            classes = targets.long() if self.are_classes(targets) else targets.argmax(-1)
            found = predictions.argmax(-1) == classes, classes == IGNORED
            values = torch.stack(found, -1).double()
        else:
            y, error = targets.double(), predictions.double() - targets
            values = torch.cat([error.abs().mean(-1, True), error.square(), y, y.square()], -1)
        return values.view(len(values), -1, self.num_statistics).mean(1).sum(0)

    def num_counted(self, targets: Tensor) -> Tensor | int:
        """Return over how many targets the loss is a mean: all that are not of class -100."""
        if not self.are_classes(targets):
            return targets.numel()
        return (targets.long() != IGNORED).sum()

    def num_samples(self, targets: Tensor) -> Tensor | float:
        """Return how many samples count; a sample of several steps counts in part."""
        counted = self.num_counted(targets)
        counted = counted.double() if isinstance(counted, Tensor) else counted
        return counted * len(targets) / max(targets.numel(), 1)

    def num_ignored(self, statistics: Tensor) -> Tensor | float:
        """Return how many samples are of class -100; a sample of several steps counts in part."""
        return statistics[-1] if self.of_classes else 0.0

    def metrics(self, means: Tensor) -> dict[str, float]:
        """Return accuracy, from 0 to 1; of values the mean absolute error and R².

        R² is $1 - \\sum e^2 / \\sum (y - \\bar y)^2$ of each value of a target, averaged over those
        that vary; 0 without any.

        Args:
            means: `statistics` over the number of samples that are not ignored, on the CPU.
        """
        if self.of_classes:
            return {"accuracy": float(means[0])}
        squares, mean, mean_square = means[1:].split(self.outputs)
        variance = mean_square - mean.square()
        varies = variance > LEAST_VARIANCE * mean_square
        r2 = (1 - squares / variance)[varies]
        return {"mae": float(means[0]), "r2": float(r2.mean()) if len(r2) else 0.0}

    def describe(self, metrics: dict[str, float]) -> str:
        if self.of_classes:
            return f"accuracy {100 * metrics['accuracy']:.2f} %"
        return f"R2 {metrics['r2']:.4f}, MAE {metrics['mae']:.4g}"

    def in_brief(self, metrics: dict[str, float]) -> str:
        """Describe loss and metrics for a line of an epoch."""
        if self.of_classes:
            return f"loss {metrics['loss']:.4f} acc {100 * metrics['accuracy']:5.2f} %"
        return f"loss {metrics['loss']:.4g} R2 {metrics['r2']:6.3f}"

    # Predictions of single examples

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of what `rows` yields."""
        columns = ("class", "probability") if self.of_classes else ("name", "value")
        return ("step", *columns) if self.per_step else columns

    def rows(self, prediction: Tensor, names: Sequence[str], top: int) -> Iterator[tuple[Any, ...]]:
        """Yield the `top` most probable classes or all values, of each step if there are several.

        Args:
            prediction: of one example, `[K]` or `[T, K]`.
            names: of classes or values.
        """
        for step, values in enumerate(prediction if self.per_step else prediction[None]):
            shown = names
            if self.of_classes:
                values, indices = values.softmax(0).topk(min(top, len(names)))
                shown = [names[i] for i in indices.tolist()]
            for row in zip(shown, values.tolist(), strict=True):
                yield (step, *row) if self.per_step else row


class Totals:
    """Running means of loss and metrics, accumulated on the device until they are read.

    Args:
        sums: of the loss and the statistics over `count` samples, as in `sums.tolist()`.
    """

    def __init__(self, task: Task, sums: Sequence[float] = (), count: float = 0) -> None:
        self.task, self.count = task, int(count)
        size = 1 + task.num_statistics
        if task.of_classes and len(sums) == size - 1:  # of an older checkpoint
            sums = [*sums, 0.0]
        self.sums = torch.tensor(sums or [0.0] * size, dtype=torch.float64).view(size)

    def add(
        self,
        predictions: Tensor,
        targets: Tensor,
        loss: Tensor | None = None,
        counted: Tensor | float | None = None,
    ) -> None:
        """Add a batch; without its loss, that of `evaluate`.

        Args:
            counted: how many samples the loss counts for; by default those that are not ignored.
        """
        loss = self.task.evaluate(predictions, targets) if loss is None else loss
        statistics = self.task.statistics(predictions, targets)
        if counted is None:
            counted = len(targets) - self.task.num_ignored(statistics)
        total = loss.detach().double() * counted
        if isinstance(counted, Tensor):
            total = total.where(counted > 0, 0.0)  # the mean over no sample is NaN
        new = torch.cat([total.view(1), statistics])
        self.sums = self.sums.to(new.device) + new
        self.count += len(targets)

    def mean(self) -> dict[str, float]:
        """Return the loss and the metrics; synchronizes with the device."""
        sums = self.sums.cpu()
        means = sums / (self.count - float(self.task.num_ignored(sums)) or 1)
        return {"loss": float(means[0]), **self.task.metrics(means[1:])}

    def reduced(self, processes: Processes, device: torch.device) -> Totals:
        """Return the totals of all processes; all of them must call this."""
        if processes.count == 1:
            return self
        values = torch.tensor([*self.sums.tolist(), self.count], dtype=torch.float64, device=device)
        # Processes that share a sequence count the same samples.
        *sums, count = (processes.sum(values) / processes.time).tolist()
        return Totals(self.task, sums, count)
