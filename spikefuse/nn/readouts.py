"""Readouts of outputs `[T, B, ...]` over time, also of padded sequences.

Of padded sequences, `lengths` `[B]` are the numbers of steps, integers from 1 to T. The steps that
follow do not count, whatever their values. `valid_steps` says which lengths are errors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spikefuse.neurons.checks import check_tensor, is_plain

__all__ = ["last", "max", "mean", "sum", "valid_steps"]

#: The steps of each sample, integers `[B]`; None for T.
Lengths = Tensor | None


def valid_steps(lengths: Tensor, num_steps: int) -> Tensor:
    """Return which steps are not padding: `[T, B]`, True where `t < lengths[b]`.

    Args:
        lengths: steps of each sample, `[B]`, integers from 1 to T.
        num_steps: T, of the padded sequences.

    Raises:
        TypeError, ValueError: the lengths are not integers `[B]`, or, on a CPU, out of range.
    """
    _check_tensor(lengths)
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise TypeError(f"lengths is {lengths.dtype}: expected integers")
    if lengths.ndim != 1:
        raise ValueError(f"lengths has shape {list(lengths.shape)}: expected [B]")
    lengths = lengths.long()  # uint8 would be compared with T modulo 256
    is_known = lengths.is_cpu and is_plain((lengths,))  # else reading it would wait for a GPU
    if is_known and not bool(((lengths >= 1) & (lengths <= num_steps)).all()):
        raise ValueError(f"lengths is {lengths.tolist()}: expected steps from 1 to T = {num_steps}")
    return torch.arange(num_steps, device=lengths.device).unsqueeze(1) < lengths


def sum(x: Tensor, lengths: Lengths = None) -> Tensor:
    """Return the sum over time, `sum_t x[t]`, such as the number of spikes.

    Args:
        x: outputs `[T, B, ...]`.
        lengths: steps of each sample, `[B]`, integers; None for T.

    Returns:
        `[B, ...]`, float32, or float64 for x in float64.
    """
    return filled(x, lengths, 0).sum(0, dtype=precise(x))


def mean(x: Tensor, lengths: Lengths = None) -> Tensor:
    """Return the mean over time, `1/T sum_t x[t]`, such as the rate of spikes.

    Args:
        x: outputs `[T, B, ...]`.
        lengths: steps of each sample, `[B]`, integers; None for T.

    Returns:
        `[B, ...]`, float32, or float64 for x in float64.
    """
    return sum(x, lengths) / steps_of(x, lengths)


def max(x: Tensor, lengths: Lengths = None) -> Tensor:
    """Return the highest value over time, `max_t x[t]`.

    Args:
        x: outputs `[T, B, ...]`, floating point.
        lengths: steps of each sample, `[B]`, integers; None for T.

    Returns:
        `[B, ...]`, of the dtype of x.
    """
    return filled(x, lengths, -torch.inf).amax(0)


def last(x: Tensor, lengths: Lengths = None) -> Tensor:
    """Return the value of the last step, `x[T - 1]`.

    Args:
        x: outputs `[T, B, ...]`.
        lengths: steps of each sample, `[B]`, integers; None for T.

    Returns:
        `[B, ...]`, of the dtype of x.
    """
    _check(x)
    if lengths is None:
        return x[-1]
    samples = torch.arange(x.shape[1], device=x.device)
    return x[valid(x, lengths).sum(0) - 1, samples]


def steps_of(x: Tensor, lengths: Lengths) -> Tensor | int:
    """Return T, or the lengths in a shape that broadcasts to `[B, ...]`."""
    _check(x)
    if lengths is None:
        return len(x)
    return valid(x, lengths).sum(0).view(-1, *[1] * (x.ndim - 2))


def filled(x: Tensor, lengths: Lengths, value: float) -> Tensor:
    """Return x with a value in the place of the padding."""
    _check(x)
    if lengths is None:
        return x
    mask = valid(x, lengths)
    return torch.where(mask.view(*mask.shape, *[1] * (x.ndim - 2)), x, value)


def precise(x: Tensor) -> torch.dtype:
    """Return the dtype of sums over time: bfloat16 counts to 256 only."""
    return torch.promote_types(x.dtype, torch.float32)


def valid(x: Tensor, lengths: Tensor) -> Tensor:
    """Return which steps of `x` are not padding, `[T, B]`, on its device."""
    _check_tensor(lengths)
    if lengths.shape != x.shape[1:2]:
        raise ValueError(
            f"lengths has shape {list(lengths.shape)} for {list(x.shape)}: expected [B] for "
            "[T, B, ...]"
        )
    return valid_steps(lengths, len(x)).to(x.device)


def _check(x: Tensor) -> None:
    check_tensor("x", x, " [T, B, ...]")
    if x.ndim == 0 or x.shape[0] == 0:
        raise ValueError(f"x has shape {list(x.shape)}: expected [T, B, ...] with T >= 1")


def _check_tensor(lengths: Tensor) -> None:
    if not isinstance(lengths, Tensor):
        raise TypeError(
            f"lengths is a {type(lengths).__name__}: expected a tensor [B], torch.tensor(lengths)"
        )
