"""Losses over time and the learning-rate schedule.

Shape legend: T time steps, B samples, C classes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from spikefuse.train.config import TrainConfig


def readout(outputs: Tensor, loss: str) -> Tensor:
    """Return the logits: the mean of the outputs over time or, with loss "last", the last step.

    Args:
        outputs: `[T, B, C]`.
        loss: one of `config.LOSSES`.

    Returns:
        float32 `[B, C]`.
    """
    return (outputs[-1] if loss == "last" else outputs.mean(0, dtype=torch.float32)).float()


def sequence_loss(outputs: Tensor, labels: Tensor, loss: str, smoothing: float = 0.0) -> Tensor:
    """Compute the training loss of outputs over time, a float32 scalar.

    `mean`: $CE(\\frac1T\\sum_t y_t)$; `last`: $CE(y_T)$; `every`: $\\frac1T\\sum_t CE(y_t)$, where
    $CE$ is the cross entropy averaged over samples.

    Source of `every`: Deng et al., "Temporal Efficient Training of Spiking Neural Network via
    Gradient Re-weighting", ICLR 2022, equation 9.

    Args:
        outputs: `[T, B, C]`.
        labels: classes `[B]`.
        loss: one of `config.LOSSES`.
        smoothing: fraction of the target spread over all classes, from 0 to 1.
    """
    if loss == "every":
        logits, labels = outputs.flatten(0, 1).float(), labels.repeat(len(outputs))
    else:
        logits = readout(outputs, loss)
    return F.cross_entropy(logits, labels, label_smoothing=smoothing)


def learning_rate(config: TrainConfig, step: int, steps_per_epoch: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    During the first $W$ steps (`warmup` epochs) it is $\\eta (n + 1) / W$, then $\\eta$, or with
    the cosine schedule $\\frac{\\eta}{2} (1 + \\cos(\\pi \\frac{n - W}{N - W}))$ over $N$ steps.

    Source of the cosine: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm
    Restarts", ICLR 2017, equation 5, without restarts.
    """
    warmup = round(config.warmup * steps_per_epoch)
    factor = 1.0
    if step < warmup:
        factor = (step + 1) / warmup
    elif config.schedule == "cosine":
        done = (step - warmup) / max(1, config.epochs * steps_per_epoch - warmup)
        factor = 0.5 * (1 + math.cos(math.pi * done))
    # Rounded to float32, the type in which an optimizer inside a CUDA graph reads it.
    return torch.tensor(config.lr * factor, dtype=torch.float32).item()
