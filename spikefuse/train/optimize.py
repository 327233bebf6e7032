"""Gradients of a batch in parts and chunks, and the optimizer that uses them.

Shape legend: T time steps, B samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from spikefuse.nn import Events, RowAdam
from spikefuse.train.config import TrainConfig
from spikefuse.train.objective import objective, readout

MOMENTUM = 0.9
# (loss, whether it is the last one of this optimizer step)
Backward = Callable[[Tensor, bool], None]


def gradients(
    net: Callable[..., Any],
    x: Tensor | Events,
    labels: Tensor,
    config: TrainConfig,
    backward: Backward,
    penalty: Callable[[], Tensor | None] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """Add the gradients of a batch to those of the parameters.

    The batch is computed in `config.accumulate` parts. Each part goes through the network in
    chunks of `config.tbptt` time steps: the state at the end of a chunk is handed on, but no
    gradient flows back through it. A chunk's loss is that of its own outputs, weighted by its
    share of the steps; with the loss "last" only the last chunk has one.

    Args:
        net: the network, a `Temporal` or what calls one.
        x: its input `[T, B, ...]`; `Events` go through it as a whole.
        labels: classes `[B]`.
        config: of the run.
        backward: adds the gradients of a loss.
        penalty: of the last call of the network, added to the loss.

    Returns:
        The loss, a scalar, and the logits `[B, classes]` of the whole batch, both detached.
    """
    num_steps, batch = x.shape[0], x.shape[1]
    length = min(config.tbptt or num_steps, num_steps)
    parts = torch.arange(batch).tensor_split(config.accumulate)
    loss, logits = torch.zeros((), device=x.device), []
    for part in parts:
        rows = slice(int(part[0]), int(part[-1]) + 1)
        last_part = rows.stop == batch
        outputs = []
        share = x if isinstance(x, Events) else x[:, rows]
        for stop, output in _chunks(net, share, length, config.loss):
            outputs.append(output.detach())
            if config.loss == "last" and stop < num_steps:
                continue
            value = objective(output, labels[rows], config.loss, config.label_smoothing)
            extra = penalty()
            if extra is not None:
                value = value + extra
            weight = 1.0 if config.loss == "last" else len(output) / num_steps
            weighted = value * (weight * len(part) / batch)
            backward(weighted, last_part and stop == num_steps)
            loss += weighted.detach()
        logits.append(readout(torch.cat(outputs), config.loss))
    return loss, torch.cat(logits)


def _chunks(
    net: Callable[..., Any], x: Tensor | Events, length: int, loss: str
) -> Iterator[tuple[int, Tensor]]:
    """The output of each chunk, and the number of steps done by its end."""
    num_steps = x.shape[0]
    if isinstance(x, Events) or length == num_steps:
        yield num_steps, net(x)
        return
    state: dict[str, Any] | None = None
    for chunk, stop in zip(x.split(length), _stops(num_steps, length), strict=True):
        with torch.set_grad_enabled(loss != "last" or stop == num_steps):
            output, state = net(chunk, state=state, return_state=True)
        state = {name: tuple(s.detach() for s in states) for name, states in state.items()}
        yield stop, output


def _stops(num_steps: int, length: int) -> list[int]:
    return [min(start + length, num_steps) for start in range(0, num_steps, length)]


def make_optimizer(
    config: TrainConfig, parameters: Iterator[torch.nn.Parameter], device: torch.device
) -> Optimizer:
    """The optimizer of a run. On a GPU it is one fused kernel, save in float16, whose gradients
    have to be rescaled, and may be clipped, before the step."""
    options: dict[str, Any] = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "fused": True if device.type == "cuda" and config.precision != "16" else None,
    }
    if config.optimizer == "row_adam":
        return RowAdam(parameters, config.lr)
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=MOMENTUM, **options)
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return kind(parameters, **options)


def settle(optimizer: Optimizer) -> None:
    """Fit the restored state of an optimizer to this device and memory layout."""
    for group in optimizer.param_groups:
        group["fused"] = fused = optimizer.defaults.get("fused")
        group["lr"] = float(group["lr"])  # a CUDA graph's is a tensor
        if "capturable" in group:
            group["capturable"] = False
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if not isinstance(value, Tensor):
                    continue
                if name == "step":  # a kernel's lies beside the parameter
                    state[name] = value.to(parameter.device if fused else "cpu")
                elif value.stride() != parameter.stride():
                    state[name] = torch.empty_like(parameter).copy_(value)


def set_learning_rate(optimizer: Optimizer, value: float) -> None:
    """For the next step; a rate that lives in a tensor stays there."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def clip(optimizer: Optimizer, largest: float | None) -> None:
    """Scale the gradients of all parameters down to a norm of at most `largest`.

    Sparse ones are those of a single backward pass, in which no row is there twice.
    """
    if largest is None:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    grads = [p.grad for p in parameters if p.grad is not None]
    if not any(grad.is_sparse for grad in grads):
        torch.nn.utils.clip_grad_norm_(parameters, largest)
        return
    values = [grad._values() if grad.is_sparse else grad for grad in grads]
    norm = torch.nn.utils.get_total_norm(values)
    torch._foreach_mul_(values, (largest / (norm + 1e-6)).clamp(max=1.0))
