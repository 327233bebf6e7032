"""Gradients by microbatches and truncated BPTT, optimizers and schedules.

Shape legend: T time steps, B samples, K outputs.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from spikefuse.nn import Events, parameter_groups
from spikefuse.train import choices
from spikefuse.train.checkpoint import EpochMetrics
from spikefuse.train.config import TrainConfig
from spikefuse.train.fields import ConfigError

MOMENTUM = 0.9
# Of the one-cycle schedule: the highest learning rate over the first, and the first over the last.
RISE_FACTOR, FALL_FACTOR = 25.0, 1e4
STEP_FACTOR = 0.1
# Options of an optimizer that say how, not what, it computes.
FORMS = "fused", "foreach", "capturable"
# Called with a loss, and whether it is the last one of this optimizer step.
Backward = Callable[[Tensor, bool], None]


def gradients(
    net: Callable[..., Any],
    x: Tensor | Events,
    labels: Tensor,
    config: TrainConfig,
    loss: Callable[[Tensor, Tensor], Tensor],
    backward: Backward,
    whole: tuple[Tensor, int] | None = None,
    penalty: Callable[[], Tensor | None] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """Accumulate the gradients of a batch into the parameters.

    The batch is split into `config.accumulate` microbatches, at most one for each sample. Each
    passes through the network in chunks of `config.tbptt` time steps; states cross chunk
    boundaries, gradients do not. The loss of a chunk is computed from its own outputs and weighted
    by its fraction of the targets that count; with loss "last", only the last chunk has a loss.
    Every chunk has a penalty, weighted by its fraction of samples and steps.

    Args:
        net: the network, a `Temporal` or a function that calls one.
        x: its input `[T, B, ...]`; `Events` are never split.
        labels: targets of the task, or class probabilities `[B, K]`.
        loss: maps outputs `[T, B, K]` of the network, and their labels, to a scalar.
        backward: computes and accumulates the gradients of a loss.
        whole: if this is a part of a batch, the labels of the batch and the number of its parts,
            over which losses and gradients are averaged later.
        penalty: returns the penalty of the most recent call of the network, a scalar, if any.

    Returns:
        The loss with penalties, a scalar, and the predictions of the whole batch, both detached.
    """
    num_steps, batch, task = x.shape[0], x.shape[1], config.make_task()
    all_labels, parts = (labels, 1) if whole is None else whole
    is_whole = parts == config.accumulate == 1 and (config.tbptt or num_steps) >= num_steps
    may_ignore = task.are_classes(labels) and task.per_step
    total, predictions = torch.zeros((), device=x.device), []
    for indices in torch.arange(batch).tensor_split(min(config.accumulate, batch)):
        rows = slice(int(indices[0]), int(indices[-1]) + 1)
        outputs = []
        microbatch = x if isinstance(x, Events) else x[:, rows]
        for steps, has_loss, output in _chunks(net, microbatch, config):
            outputs.append(output.detach())
            part_of_time = (steps.stop - steps.start) / num_steps
            value = penalty()
            if value is not None:
                value = value * (len(indices) * parts / len(all_labels) * part_of_time)
            if has_loss:
                part = labels[rows, steps] if task.per_step else labels[rows]
                weighted = loss(output, part)
                if not is_whole or may_ignore:
                    counted = task.num_counted(all_labels)
                    counted = counted.clamp(min=1) if isinstance(counted, Tensor) else counted
                    weight = task.num_counted(part) * parts / counted
                    if not task.per_step and config.loss != "last":
                        weight = weight * part_of_time
                    weighted = weighted * weight
                    if isinstance(weight, Tensor):
                        weighted = weighted.masked_fill(~(weight > 0), 0.0)  # NaN, without a target
                value = weighted if value is None else weighted + value
            if value is not None:
                if has_loss or value.requires_grad:  # a penalty of frozen layers has no gradient
                    backward(value, rows.stop == batch and steps.stop == num_steps)
                total += value.detach()
        predictions.append(task.predict(torch.cat(outputs)))
    return total, torch.cat(predictions)


def _chunks(
    net: Callable[..., Any], x: Tensor | Events, config: TrainConfig
) -> Iterator[tuple[slice, bool, Tensor]]:
    """Yield the steps of each chunk, whether it has a loss, and its output."""
    num_steps = x.shape[0]
    if isinstance(x, Events) or config.tbptt is None or config.tbptt >= num_steps:
        yield slice(0, num_steps), True, net(x)
        return
    state: dict[str, Any] | None = None
    for start in range(0, num_steps, config.tbptt):
        steps = slice(start, min(start + config.tbptt, num_steps))
        has_loss = config.loss != "last" or steps.stop == num_steps
        with torch.set_grad_enabled(has_loss or config.rate_penalty > 0):
            output, state = net(x[steps], state=state, return_state=True)
        state = {name: tuple(s.detach() for s in states) for name, states in state.items()}
        yield steps, has_loss, output


def make_optimizer(config: TrainConfig, net: nn.Module, device: torch.device) -> Optimizer:
    """Create the optimizer: fused on a GPU if it can be, except in float16, whose gradients must be
    unscaled and perhaps clipped before the step."""
    kind: Callable[..., Optimizer] = choices.OPTIMIZERS[config.optimizer]
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if "fused" in inspect.signature(kind).parameters:
        options["fused"] = True if device.type == "cuda" and config.precision != "16" else None
    if config.optimizer == "sgd":
        options["momentum"] = MOMENTUM
    if config.weight_decay == 0 or config.decay_all:
        return kind(net.parameters(), **options)
    return kind(parameter_groups(net, config.weight_decay), **options)


def adapt_state(optimizer: Optimizer) -> None:
    """Convert restored optimizer state to the current device, memory format and kind of step.

    Raises:
        ValueError: the state does not fit the parameters.
    """
    fused = optimizer.defaults.get("fused")
    for group in optimizer.param_groups:
        # A CUDA graph saves other forms.
        forms = {name: optimizer.defaults[name] for name in FORMS if name in optimizer.defaults}
        group.update({**forms, "lr": float(group["lr"])})
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                shape = () if name == "step" else parameter.shape
                fits = isinstance(value, Tensor) and value.shape == shape
                if not fits or (name == "step" and not value >= 0):
                    raise ValueError(f"the optimizer state {name} does not fit its parameter")
                if name == "step":  # fused optimizers expect it on the device of the parameter
                    state[name] = value.to(parameter.device if fused else "cpu")
                elif value.stride() != parameter.stride():
                    state[name] = torch.empty_like(parameter).copy_(value)


def learning_rate(config: TrainConfig, step: int, steps_per_epoch: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    During the first $W$ steps (`warmup` epochs) it is $\\eta (n + 1) / W$, then $\\eta$, with the
    cosine schedule $\\frac{\\eta}{2} (1 + \\cos(\\pi \\frac{n - W}{N - W}))$ over $N$ steps, or
    with "step" a tenth of the rate before after each `step_epochs`. "one-cycle" equals
    `torch.optim.lr_scheduler.OneCycleLR` with constant momentum. The rate depends on the step
    alone, so that a resumed run continues it.

    Sources: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", ICLR
    2017, equation 5, without restarts; Smith and Topin, "Super-Convergence: Very Fast Training of
    Neural Networks Using Large Learning Rates", 2018.
    """
    warmup, total = round(config.warmup * steps_per_epoch), config.epochs * steps_per_epoch
    factor = 1.0
    if config.schedule == "one-cycle":
        factor = _one_cycle(step, config.warmup * steps_per_epoch - 1, total - 1)
    elif step < warmup:
        factor = (step + 1) / warmup
    elif config.schedule == "cosine":
        factor = _cosine(1.0, 0.0, (step - warmup) / max(1, total - warmup))
    elif config.schedule == "step":
        assert config.step_epochs is not None
        factor = STEP_FACTOR ** (step // (config.step_epochs * steps_per_epoch))
    # Rounded to float32, the type in which an optimizer inside a CUDA graph reads it.
    return torch.tensor(config.lr * factor, dtype=torch.float32).item()


def steps_per_epoch(config: TrainConfig, batches: float) -> int:
    """Return the number of steps of an epoch; 1 if it is infinite, and the rate constant.

    Raises:
        ConfigError: it is infinite, and the rate depends on it.
    """
    if math.isfinite(batches):
        return int(batches)
    if config.schedule != "constant" or config.warmup:
        raise ConfigError(
            f"the loader has no length, which the schedule {config.schedule} with warmup "
            f"{config.warmup:g} needs: choose Trainer(limit_train_batches=...), or a constant "
            "schedule without warmup"
        )
    return 1


def _one_cycle(step: int, peak: float, last: int) -> float:
    """Return the factor of a step; the peak may lie between two steps, or before the first."""
    first = 1 / RISE_FACTOR
    if step < peak:
        return _cosine(first, 1.0, step / peak)
    return _cosine(1.0, first / FALL_FACTOR, (step - peak) / (last - peak))


def _cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * done))


def rate_ratios(optimizer: Optimizer, start: int = 0) -> list[float]:
    """Return the learning rate of each group of parameters, divided by the optimizer's.

    Args:
        start: the first group, which has not made a step yet.
    """
    groups = optimizer.param_groups[start:]  # others are not read, which may wait for a GPU
    if not groups:
        return []
    own = float(optimizer.defaults.get("lr", groups[0]["lr"]))
    return [float(group["lr"]) / own if own else 1.0 for group in groups]


def check_rate(optimizer: Optimizer, rate: float) -> None:
    """Warn of a learning rate that the schedule replaces.

    Args:
        optimizer: before its first step.
        rate: the learning rate of the configuration.

    Warns:
        UserWarning: the optimizer was made with another learning rate than `rate`, or rates of its
            groups are relative to another one, the default of its class.
    """
    own = float(optimizer.defaults.get("lr", rate))
    argument = inspect.signature(type(optimizer)).parameters.get("lr")
    is_chosen = argument is None or own != argument.default or {*rate_ratios(optimizer)} != {1.0}
    # A rate in a tensor may be rounded to float32.
    if is_chosen and not math.isclose(own, rate, rel_tol=1e-6):
        warnings.warn(
            f"configure_optimizers has returned an optimizer with lr={own:g}, which the schedule "
            f"replaces by that of the configuration, {rate:g}: choose TrainConfig(lr={own:g}), or "
            "return a scheduler with the optimizer",
            stacklevel=2,
        )


def check_schedulers(schedulers: Sequence[LRSchedulerConfig]) -> None:
    """Raise a ConfigError for schedulers that `step_schedulers` cannot step."""
    for config in schedulers:
        if isinstance(config.scheduler, ReduceLROnPlateau):
            raise ConfigError(
                "configure_optimizers has returned ReduceLROnPlateau, which needs a metric: keep "
                "it as an attribute, call its step in on_validation_epoch_end, after super(), "
                "which logs the metrics, and leave the schedule constant"
            )
        if config.interval not in ("step", "epoch"):
            raise ConfigError(
                f"configure_optimizers has returned a scheduler with interval {config.interval!r}: "
                "expected 'step' or 'epoch'"
            )


def step_schedulers(schedulers: Sequence[LRSchedulerConfig], batch: int, epoch: int | None) -> None:
    """Step schedulers after an optimizer step, as Lightning does.

    Args:
        batch: the index of the batch in its epoch.
        epoch: the index of the epoch, if the batch is its last one.
    """
    for config in schedulers:
        index = batch if config.interval == "step" else epoch
        if index is not None and (index + 1) % config.frequency == 0:
            config.scheduler.step()  # type: ignore[call-arg]


def set_learning_rate(
    optimizer: Optimizer, value: float, ratios: Sequence[float] | None = None
) -> None:
    """Set the learning rate of the next step; a rate held in a tensor is overwritten in place.

    Args:
        ratios: of each group, to multiply its rate; by default 1.
    """
    for i, group in enumerate(optimizer.param_groups):
        # In float32, as `learning_rate`.
        rate = torch.tensor(value * (ratios[i] if ratios else 1.0), dtype=torch.float32).item()
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def clip(optimizer: Optimizer, max_norm: float | None) -> None:
    """Scale all gradients together to a norm of at most `max_norm`."""
    if max_norm is not None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)


def check_finite(net: nn.Module, row: EpochMetrics) -> None:
    """Stop a run that cannot recover: a loss, a parameter or a running statistic is infinite or
    NaN.

    Neurons whose potential is NaN never fire, so that the loss may be finite nevertheless.

    Args:
        row: the metrics of an epoch.

    Raises:
        FloatingPointError: with the names of both.
    """
    wrong = [f"{n} is {row[n]}" for n in ("train_loss", "val_loss") if not math.isfinite(row[n])]
    # Other buffers may be masks, which are infinite.
    buffers = {n: b for n, b in net.named_buffers() if ".running_" in n}
    tensors = {**dict(net.named_parameters()), **buffers}
    finite = torch.stack([x.detach().isfinite().all() for x in tensors.values()]).tolist()
    wrong += [f"{n} is not finite" for n, ok in zip(tensors, finite, strict=True) if not ok][:1]
    if wrong:
        raise FloatingPointError(
            f"after epoch {row['epoch']:.0f}, {' and '.join(wrong)}: lower the learning rate, clip "
            "gradients (--clip), or check the examples for such values, for which neurons give no "
            "spikes"
        )
