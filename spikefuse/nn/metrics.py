"""Accuracies of spiking outputs `[T, B, N]`, with targets `[B]` of class indices.

Samples of class -100 are left out, as by the losses; if all are, the accuracy is NaN. Other classes
outside of 0 to N - 1 are errors, which a CPU reports as ValueError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spikefuse.neurons.checks import check_tensor
from spikefuse.nn import readouts
from spikefuse.nn.losses import check_classes, first_spike_time, mean_of_counted
from spikefuse.nn.readouts import Lengths


def accuracy_by_rate(spikes: Tensor, target: Tensor, lengths: Lengths = None) -> Tensor:
    """Return the share of samples whose target fires most: `mean_b [argmax_n sum_t s = target]`.

    Of several neurons that fire as often, the first one counts.

    Args:
        spikes: `[T, B, N]`, N neurons, one per class; or potentials.
        target: class indices `[B]`, integers.
        lengths: steps of each sample, `[B]`, integers; None for T.

    Returns:
        A scalar, float32, on the device of the spikes.

    Raises:
        TypeError, ValueError: wrong dtypes, shapes or classes.
    """
    _check(spikes, target)
    is_correct = readouts.sum(spikes, lengths).argmax(-1) == target
    return mean_of_counted(is_correct.float(), target)


def accuracy_by_first_spike(spikes: Tensor, target: Tensor, lengths: Lengths = None) -> Tensor:
    """Return the share of samples whose target fires first: `mean_b [argmin_n t_n = target]`.

    Of several neurons that fire at the same step, the first one counts. A sample without a spike
    counts as wrong.

    Args:
        spikes: `[T, B, N]`, N neurons, one per class.
        target: class indices `[B]`, integers.
        lengths: steps of each sample, `[B]`, integers; None for T.

    Returns:
        A scalar, float32, on the device of the spikes.

    Raises:
        TypeError, ValueError: wrong dtypes, shapes or classes.
    """
    _check(spikes, target)
    first = first_spike_time(spikes.detach(), lengths).min(-1).indices
    fires = readouts.filled(spikes, lengths, 0).any(0).any(-1)
    return mean_of_counted((fires & (first == target)).float(), target)


def _check(spikes: Tensor, target: Tensor) -> None:
    """Check the shapes, since a comparison would broadcast `[B, 1]` or `[1]` without an error."""
    check_tensor("spikes", spikes, " [T, B, N]")
    check_tensor("target", target, " [B]")
    if spikes.ndim != 3 or not len(spikes):
        raise ValueError(
            f"the outputs have shape {list(spikes.shape)}: expected [T, B, N] with T >= 1"
        )
    if target.dtype == torch.bool or target.is_floating_point() or target.is_complex():
        raise TypeError(
            f"target is {target.dtype}: expected integer class indices; those of class "
            "probabilities or one-hot rows [B, N] are target.argmax(-1)"
        )
    num = spikes.shape[1]
    if target.shape != (num,):
        raise ValueError(
            f"target has shape {list(target.shape)}: expected a class index for each of {num} "
            f"samples, [{num}]"
        )
    check_classes(target.long(), spikes.shape[2])
