"""Losses on spikes and potentials over time, and penalties on activity.

Outputs are `[T, B, N]`: T steps, B samples and N neurons, one per class unless stated otherwise;
targets are class indices `[B]`, integers, or class probabilities `[B, N]`, such as those that
`data.mixup` and `data.cutmix` return. With probabilities p, the desired value of a neuron is
`p correct + (1 - p) incorrect`. Samples of class -100 are left out, as by PyTorch's cross-entropy;
if all are, the loss is NaN, as there: skip such a batch. Other classes outside of 0 to N - 1 are
errors, which a CPU reports as ValueError.

Each loss is a scalar, a mean over the batch, and computed in float32, or in float64 for outputs in
float64. For class weights or other reductions, call `torch.nn.functional.cross_entropy` on the same
arguments.

Of padded sequences, `lengths` `[B]` are the numbers of steps, integers from 1 to T. Each sample
then has the loss of its own steps: in its equation, T is its length.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spikefuse.neurons.checks import check_tensor, integer, is_plain
from spikefuse.nn import readouts
from spikefuse.nn.readouts import Lengths

#: The class of samples that PyTorch's cross-entropy leaves out.
IGNORED = -100


def ce_count(spikes: Tensor, target: Tensor, lengths: Lengths = None) -> Tensor:
    """Compute the cross-entropy of spike counts: `CE(sum_t s[t], target)`.

    Source: Eshraghian et al., "Training Spiking Neural Networks Using Lessons From Deep Learning",
    Proceedings of the IEEE 111, 2023 (snnTorch's `ce_count_loss`).

    Args:
        spikes: `[T, B, N]`, N neurons, one per class.
        target: class indices `[B]`, integers, or class probabilities `[B, N]`.
        lengths: steps of each sample, `[B]`, integers; None for T.

    Raises:
        TypeError, ValueError: wrong dtypes, shapes or classes.
    """
    spikes, target = _checked(spikes, target)
    return F.cross_entropy(readouts.sum(spikes, lengths), target)


def ce_rate(
    x: Tensor, target: Tensor, weight: float = 0.0, level: float = 1.0, lengths: Lengths = None
) -> Tensor:
    """Compute the mean over time of each step's cross-entropy, the TET loss.

    Equation, with λ the `weight` and φ the `level`::

        (1 - λ) 1/T sum_t CE(x[t], target) + λ mean_{t,b,n} (x[t] - φ)^2

    Source: Deng et al., "Temporal Efficient Training of Spiking Neural Network via Gradient
    Re-weighting", ICLR 2022, Eqs. 9 to 11 (their code has λ = 0.001 and φ = 1, the threshold;
    snnTorch's `ce_rate_loss` has λ = 0).

    Args:
        x: spikes or logits `[T, B, N]`, one per class.
        target: class indices `[B]`, integers, or class probabilities `[B, N]`.
        weight: of the term that pulls the outputs to `level`, in [0, 1].
        level: in the unit of `x`.
        lengths: steps of each sample, `[B]`, integers; None for T.

    Raises:
        TypeError, ValueError: wrong dtypes, shapes or classes, or `weight` is out of range.
    """
    if not 0 <= weight <= 1:
        raise ValueError(f"weight is {weight!r}: expected a number in [0, 1]")
    x, target = _checked(x, target)
    x = readouts.filled(x, lengths, 0)  # whose gradients would be NaN times 0, if it is NaN
    labels = target.expand(len(x), *target.shape).flatten(0, 1)
    losses = F.cross_entropy(x.flatten(0, 1), labels, reduction="none").view(x.shape[:2])
    if weight != 0:
        losses = (1 - weight) * losses + weight * (x - level).square().mean(2)
    return mean_of_counted(readouts.mean(losses, lengths), target)


def ce_max_membrane(v: Tensor, target: Tensor, lengths: Lengths = None) -> Tensor:
    """Compute the cross-entropy of the highest potentials: `CE(max_t v[t], target)`.

    Source: Cramer et al., "The Heidelberg Spiking Data Sets for the Systematic Evaluation of
    Spiking Neural Networks", IEEE TNNLS 33, 2022 (the max-over-time loss).

    Args:
        v: potentials `[T, B, N]`, such as those of `sf.LI` or of `outputs=("v",)`.
        target: class indices `[B]`, integers, or class probabilities `[B, N]`.
        lengths: steps of each sample, `[B]`, integers; None for T.

    Raises:
        TypeError, ValueError: wrong dtypes, shapes or classes.
    """
    v, target = _checked(v, target)
    return F.cross_entropy(readouts.max(v, lengths), target)


def mse_count(
    spikes: Tensor,
    target: Tensor,
    correct_rate: float = 1.0,
    incorrect_rate: float = 0.0,
    lengths: Lengths = None,
) -> Tensor:
    """Compute the squared error of spike counts, `1/T mean_{b,n} (sum_t s[t] - T r)^2`.

    r is the desired rate of a neuron: `correct_rate` for that of the target, `incorrect_rate` for
    all others. The mean squared error of rates is this divided by T.

    `pool_population` sums P neurons, whose rates are P times that of one: for 0.75 per neuron,
    `correct_rate=P * 0.75`.

    Source: Shrestha and Orchard, "SLAYER: Spike Layer Error Reassignment in Time", NeurIPS 2018
    (the loss on the number of spikes), as in snnTorch's `mse_count_loss`, which truncates T r to a
    whole number.

    Args:
        spikes: `[T, B, N]`, N neurons, one per class.
        target: class indices `[B]`, integers, or class probabilities `[B, N]`.
        correct_rate, incorrect_rate: spikes per step, in [0, 1], or in [0, P] of P neurons.
        lengths: steps of each sample, `[B]`, integers; None for T.

    Raises:
        TypeError, ValueError: wrong dtypes, shapes or classes.
    """
    spikes, target = _checked(spikes, target)
    steps = readouts.steps_of(spikes, lengths)
    wanted = steps * _per_class(spikes, target, correct_rate, incorrect_rate)
    errors = (readouts.sum(spikes, lengths) - wanted).square() / steps
    return mean_of_counted(errors.mean(1), target)


def mse_membrane(
    v: Tensor, target: Tensor, correct: float = 1.0, incorrect: float = 0.0, lengths: Lengths = None
) -> Tensor:
    """Compute the squared error of potentials at all steps: `mean_{t,b,n} (v[t] - w)^2`.

    w is the desired potential of a neuron: `correct` for that of the target, `incorrect` for all
    others. For targets that change over time, use `torch.nn.functional.mse_loss`.

    Source: Eshraghian et al., 2023, as for `ce_count` (snnTorch's `mse_membrane_loss`).

    Args:
        v: potentials `[T, B, N]` of N neurons, one per class.
        target: class indices `[B]`, integers, or class probabilities `[B, N]`.
        correct, incorrect: potentials, in the unit of `v`.
        lengths: steps of each sample, `[B]`, integers; None for T.

    Raises:
        TypeError, ValueError: wrong dtypes, shapes or classes.
    """
    v, target = _checked(v, target)
    errors = readouts.filled(v, lengths, 0) - _per_class(v, target, correct, incorrect)
    return mean_of_counted(readouts.mean(errors.square(), lengths).mean(1), target)


def ce_temporal(spikes: Tensor, target: Tensor, lengths: Lengths = None) -> Tensor:
    """Compute the cross-entropy of negative first spike times: `CE(-first_spike_time(s), target)`.

    The earliest neuron should be that of the target. See `first_spike_time` for the gradient and
    for silent neurons.

    Source: Mostafa, "Supervised Learning Based on Temporal Coding in Spiking Neural Networks",
    IEEE TNNLS 29, 2018 (cross-entropy of negative spike times).

    Args:
        spikes: `[T, B, N]`, N neurons, one per class.
        target: class indices `[B]`, integers, or class probabilities `[B, N]`.
        lengths: steps of each sample, `[B]`, integers; None for T.

    Raises:
        TypeError, ValueError: wrong dtypes, shapes or classes.
    """
    spikes, target = _checked(spikes, target)
    return F.cross_entropy(-first_spike_time(spikes, lengths), target)


def mse_temporal(
    spikes: Tensor,
    target: Tensor,
    correct: float = 0.0,
    incorrect: float | None = None,
    lengths: Lengths = None,
) -> Tensor:
    """Compute the squared error of first spike times over T: `mean_{b,n} ((t - w) / T)^2`.

    w is the desired time of a neuron, `correct` for that of the target and `incorrect` for all
    others. See `first_spike_time` for the gradient and for silent neurons.

    Source: Eshraghian et al., 2023, as for `ce_count` (snnTorch's `mse_temporal_loss`).

    Args:
        spikes: `[T, B, N]`, N neurons, one per class.
        target: class indices `[B]`, integers, or class probabilities `[B, N]`.
        correct, incorrect: times in steps; None for T, no spike at all.
        lengths: steps of each sample, `[B]`, integers; None for T.

    Raises:
        TypeError, ValueError: wrong dtypes, shapes or classes.
    """
    spikes, target = _checked(spikes, target)
    steps = readouts.steps_of(spikes, lengths)
    wanted = _per_class(spikes, target, correct, steps if incorrect is None else incorrect)
    errors = ((first_spike_time(spikes, lengths) - wanted) / steps).square()
    return mean_of_counted(errors.mean(1), target)


def first_spike_time(spikes: Tensor, lengths: Lengths = None) -> Tensor:
    """Return the step of each neuron's first spike, 0 to T - 1, or T where there is none.

    The time has no derivative. Backward passes -1 times its gradient to the first spike: more drive
    there means an earlier spike. Of a neuron without one, it goes to the last step.

    Source: Eshraghian et al., 2023, as for `ce_count`. snnTorch counts a silent neuron as one that
    fires at the last step; here it is later than any that fires.

    Args:
        spikes: `[T, ...]`, zeros and other values, floating point.
        lengths: steps of each sample, `[B]`, integers; None for T.

    Returns:
        `[...]`, float32, or float64 for spikes in float64.
    """
    steps = readouts.steps_of(spikes, lengths)
    spikes = readouts.filled(spikes, lengths, 0)
    fired = spikes != 0
    # argmax gives the first of several maxima.
    first = torch.where(fired.any(0), fired.to(torch.uint8).argmax(0), steps)
    last = first.clamp(max=steps - 1).unsqueeze(0)
    spike = spikes.gather(0, last).squeeze(0).to(readouts.precise(spikes))
    return first - (spike - spike.detach())  # minus 0, with a gradient


def l1_activity(spikes: Tensor, lengths: Lengths = None) -> Tensor:
    """Compute the mean of non-negative spikes, `mean_{t,b,n} s`: their L1 norm, as a rate per step.

    The gradient is the same at each neuron and step, whether it fired or not. snnTorch's
    `l1_rate_sparsity` is `Lambda` times the sum, which grows with T, B and N.

    Source: Zenke and Vogels, "The Remarkable Robustness of Surrogate Gradient Learning for
    Instilling Complex Function in Spiking Neural Networks", Neural Computation 33, 2021.

    Args:
        spikes: `[T, ...]`, such as a layer's in `sf.record(net, grad=True)`.
        lengths: steps of each sample, `[B]`, integers; None for T.
    """
    return readouts.mean(spikes, lengths).mean()


def l2_activity(spikes: Tensor, lengths: Lengths = None) -> Tensor:
    """Compute the mean squared rate, `mean_{b,n} (1/T sum_t s[t])^2`: busy neurons cost most.

    Source: as for `l1_activity`.

    Args:
        spikes: `[T, ...]`, such as a layer's in `sf.record(net, grad=True)`.
        lengths: steps of each sample, `[B]`, integers; None for T.
    """
    return readouts.mean(spikes, lengths).square().mean()


def rate_bounds(
    spikes: Tensor, lower: float = 0.0, upper: float = 1.0, lengths: Lengths = None
) -> Tensor:
    """Penalize neurons that fire too little or too much:
    `mean_n max(0, lower - r_n)^2 + max(0, r_n - upper)^2`.

    r is a neuron's mean rate over T and B, in spikes per step. A rate between the bounds costs
    nothing, so neurons may still differ between samples.

    Source: as for `l1_activity` (lower and upper bounds on activity).

    Args:
        spikes: `[T, B, ...]`, such as a layer's in `sf.record(net, grad=True)`.
        lower, upper: rates, in spikes per step.
        lengths: steps of each sample, `[B]`, integers; None for T.

    Raises:
        ValueError: `lower` is greater than `upper`.
    """
    if lower > upper:
        raise ValueError(f"lower is {lower} and upper {upper}: expected lower <= upper")
    rate = readouts.mean(spikes, lengths).mean(0)
    return ((lower - rate).relu().square() + (rate - upper).relu().square()).mean()


def pool_population(x: Tensor, num_classes: int) -> Tensor:
    """Sum the neurons of each class: `y[..., c] = sum_i x[..., c N / C + i]`, a population code.

    The result goes into the losses and metrics that count spikes. The rates of `mse_count` are
    then spikes per step of all N / C neurons of a class.

    Source: Eshraghian et al., 2023, as for `ce_count` (snnTorch's `population_code=True`, whose
    rates in `mse_count_loss` are those of one neuron).

    Args:
        x: `[..., N]`, neuron after neuron for each class.
        num_classes: C, a divisor of N.

    Returns:
        `[..., C]`, float32, or float64 for x in float64.

    Raises:
        ValueError: C does not divide N.
    """
    check_tensor("x", x, " [..., N]")
    if x.shape[-1] % integer("num_classes", num_classes):
        raise ValueError(
            f"num_classes is {num_classes} for {x.shape[-1]} neurons: expected a divisor of them"
        )
    return x.unflatten(-1, (num_classes, -1)).sum(-1, dtype=readouts.precise(x))


def mean_of_counted(values: Tensor, target: Tensor) -> Tensor:
    """Return the mean of values `[B]` over the samples that are not ignored."""
    if target.ndim > 1:
        return values.mean()
    is_counted = target.long() != IGNORED  # uint8 would be compared with -100 modulo 256
    return values.where(is_counted, 0).sum() / is_counted.sum()


def _per_class(x: Tensor, target: Tensor, correct: float, incorrect: float | Tensor) -> Tensor:
    """Return `[B, N]`: `correct` for the neuron of each target, `incorrect` for all others."""
    if target.ndim == 1:
        classes = target.where(target != IGNORED, 0).unsqueeze(1)
        target = x.new_zeros(x.shape[1:]).scatter_(1, classes, 1.0)
    return incorrect + (correct - incorrect) * target


def _checked(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Check the shapes, and convert outputs and class probabilities to the dtype of sums."""
    check_tensor("x", x, " [T, B, N]")
    check_tensor("target", target, " [B], or of class probabilities [B, N]")
    if x.ndim != 3 or not len(x):
        raise ValueError(f"the outputs have shape {list(x.shape)}: expected [T, B, N] with T >= 1")
    is_soft = target.is_floating_point()
    if x.is_complex() or target.dtype == torch.bool or target.is_complex():
        raise TypeError(
            f"the outputs are {x.dtype}, target is {target.dtype}: expected real outputs, and "
            "integer class indices or floating-point class probabilities"
        )
    if target.shape != x.shape[1 : 3 if is_soft else 2]:
        num = x.shape[1]
        raise ValueError(
            f"target is {target.dtype} {list(target.shape)}: expected a class index for each of "
            f"{num} samples, [{num}], or floating-point class probabilities {list(x.shape[1:])}"
        )
    dtype = readouts.precise(x)
    if is_soft:
        return x.to(dtype), target.to(dtype)
    check_classes(target.long(), x.shape[2])
    return x.to(dtype), target.long()


def check_classes(target: Tensor, num_classes: int) -> None:
    """Raise ValueError if a class on a CPU, int64, is neither in range nor ignored."""
    if not (target.is_cpu and is_plain((target,))):  # reading it would wait for a GPU
        return
    wrong = ((target < 0) | (target >= num_classes)) & (target != IGNORED)
    if wrong.any():
        raise ValueError(
            f"target has class {target[wrong][0].item()}: expected 0 to {num_classes - 1}, for "
            f"{num_classes} neurons, or {IGNORED} for samples to leave out"
        )
