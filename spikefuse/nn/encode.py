"""Encodings of a static input `[B, ...]` as a sequence `[T, B, ...]`; `delta` and `population`
encode changes over time, and values as several neurons."""

from __future__ import annotations

import torch
from torch import Tensor

from spikefuse.neurons.checks import check_tensor, integer, is_plain

__all__ = ["delta", "direct", "latency", "poisson", "population"]


def direct(x: Tensor, num_steps: int) -> Tensor:
    """Repeat the analog input at every time step: direct encoding, `y[t] = x`.

    The time dimension has stride 0; nothing is copied.

    Source: Rathi and Roy, "DIET-SNN: A Low-Latency Spiking Neural Network with Direct Input
    Encoding and Leakage and Threshold Optimization", IEEE TNNLS 34(6), 2023.

    Args:
        x: input `[B, ...]` of any dtype.
        num_steps: T, at least 1.

    Returns:
        A view `[T, B, ...]` of `x`.

    Raises:
        TypeError, ValueError: `x` is not a tensor or has no batch dimension; `num_steps` < 1.
    """
    _check(x, num_steps)
    return x.unsqueeze(0).expand(num_steps, *x.shape)


def poisson(x: Tensor, num_steps: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw a spike with probability `x` at every time step: Poisson (rate) encoding.

    `y[t] = 1 if u[t] < x else 0`, with `u` uniform in [0, 1). Values of at most 0 never spike,
    values of at least 1 always do.

    Source: Li et al., "Towards Scalable GPU-Accelerated SNN Training via Temporal Fusion",
    section 5.2 ("Poisson sampling"); a Bernoulli draw per step approximates a Poisson process.

    Args:
        x: spike probabilities `[B, ...]`, floating point.
        num_steps: T, at least 1.
        generator: random number generator on the device of `x`; PyTorch's default if None.

    Returns:
        Zeros and ones `[T, B, ...]` in the dtype of `x`.

    Raises:
        TypeError, ValueError: `x` is not a floating-point tensor or has no batch dimension, or, on
            a CPU, has NaN or values of 2 or more, which are no probabilities; `num_steps` < 1; the
            generator is on another device.
    """
    _check(x, num_steps)
    if not x.is_floating_point():
        raise TypeError(f"x is {x.dtype}: expected spike probabilities, such as pixels / 255")
    if x.device.type == "cpu" and is_plain((x,)) and x.numel() and not x.max() < 2:
        raise ValueError(f"x is up to {x.max():g}: expected probabilities, such as pixels / 255")
    if generator is not None and generator.device.type != x.device.type:
        raise ValueError(
            f"generator is on {generator.device}, x on {x.device}: create it with "
            f"torch.Generator('{x.device}')"
        )
    # Always float32: bfloat16 random numbers have only 8 bits.
    shape = num_steps, *x.shape
    draws = torch.rand(shape, dtype=torch.float32, device=x.device, generator=generator)
    return (draws < x).to(x.dtype)


def latency(x: Tensor, num_steps: int, tau: float | None = None, threshold: float = 0.0) -> Tensor:
    """Give each value one spike, the earlier the greater it is: time-to-first-spike encoding.

    The step is `round(t)` with::

        t = (T - 1) (1 - x)                        (tau=None)
        t = tau log(x / (x - threshold))           (tau given)

    The second one is when a membrane with time constant tau reaches the threshold under the
    constant current x. Values below the threshold, and those whose step is T or later, do not
    spike.

    Source: Thorpe et al., "Spike-based strategies for rapid processing", Neural Networks 14, 2001;
    for the membrane, Eshraghian et al., "Training Spiking Neural Networks Using Lessons From Deep
    Learning", Proceedings of the IEEE 111, 2023.

    Args:
        x: intensities `[B, ...]` in [0, 1], floating point.
        num_steps: T, at least 1.
        tau: time constant in steps; None for linear times, which use all steps.
        threshold: the least value that spikes.

    Returns:
        Zeros and ones `[T, B, ...]` in the dtype of `x`.

    Raises:
        TypeError, ValueError: `x` is not a floating-point tensor in [0, 1] or has no batch
            dimension; `num_steps` < 1; `tau` is not positive, or given without a threshold.
    """
    _check(x, num_steps)
    if not x.is_floating_point():
        raise TypeError(f"x is {x.dtype}: expected intensities, such as pixels / 255")
    if x.numel() and not (x.min() >= 0 and x.max() <= 1):
        raise ValueError(f"x is in [{x.min():g}, {x.max():g}]: expected values in [0, 1]")
    u = x.float()
    if tau is None:
        time = (num_steps - 1) * (1 - u)
    elif tau > 0 and threshold > 0:
        time = tau * torch.log(u / (u - threshold).clamp(min=0))
    else:
        raise ValueError(f"tau, threshold are {tau}, {threshold}: expected positive numbers")
    # A membrane that never reaches the threshold has an infinite time, or 0 / 0 at x = 0.
    step = torch.where(u < threshold, num_steps, time.nan_to_num(num_steps)).round()
    steps = torch.arange(num_steps, device=x.device).view(-1, *[1] * x.ndim)
    return (step == steps).to(x.dtype)


def delta(x: Tensor, threshold: float, signed: bool = False) -> Tensor:
    """Spike where a sequence rises by at least a threshold from one step to the next.

    `y[t] = 1 if x[t] - x[t-1] >= threshold else 0`; with `signed`, `y[t] = -1` where it falls by as
    much. The first step has no step before it, and no spikes.

    Source: Eshraghian et al., "Training Spiking Neural Networks Using Lessons From Deep Learning",
    Proceedings of the IEEE 111, 2023 (delta modulation).

    Args:
        x: a sequence `[T, B, ...]`, floating point or whole numbers.
        threshold: in the unit of `x`, positive.
        signed: whether falls spike, too.

    Returns:
        `[T, B, ...]` in the dtype of `x`, or in PyTorch's default dtype for whole numbers.

    Raises:
        TypeError, ValueError: `x` is not a tensor of real numbers, or has no dimensions;
            `threshold` <= 0.
    """
    _check(x, 1)
    dtype = _real_dtype(x)
    if not threshold > 0:
        raise ValueError(f"threshold is {threshold!r}: expected a positive number")
    if not x.is_floating_point():
        x = x.long()  # differences of bytes would wrap around
    change = x.diff(dim=0, prepend=x[:1])
    spikes = (change >= threshold).to(dtype)
    return spikes - (change <= -threshold).to(dtype) if signed else spikes


def population(
    x: Tensor, num_neurons: int, low: float = 0.0, high: float = 1.0, width: float | None = None
) -> Tensor:
    """Encode each value by the activity of several neurons with Gaussian receptive fields.

    `y[..., f P + p] = exp(-(x[..., f] - c_p)^2 / (2 width^2))`, with P equally spaced
    centers c from `low` to `high`. `poisson` draws spikes with these probabilities, and `direct`
    repeats them.

    Source: Bohte et al., "Error-backpropagation in temporally encoded networks of spiking neurons",
    Neurocomputing 48, 2002.

    Args:
        x: values `[B, ..., F]`, floating point or whole numbers.
        num_neurons: P, at least 2.
        low: first center, in the unit of `x`.
        high: last center.
        width: standard deviation, in the unit of `x`; None for the distance between centers.

    Returns:
        Activities in [0, 1], `[B, ..., F * P]` in the dtype of `x`, or in PyTorch's default dtype
        for whole numbers. They are 0 for values far outside `low` to `high`.

    Raises:
        TypeError, ValueError: `x` is not a tensor of real numbers, or has no dimensions;
            `num_neurons` < 2, `low` >= `high` or `width` <= 0.
    """
    _check(x, 1)
    num_neurons = integer("num_neurons", num_neurons, 2)
    spread = (high - low) / (num_neurons - 1) if width is None else width
    if not (low < high and spread > 0):
        raise ValueError(
            f"low, high, width are {low}, {high}, {width}: expected low < high, width > 0"
        )
    x = x.to(_real_dtype(x))
    centers = torch.linspace(low, high, num_neurons, dtype=x.dtype, device=x.device)
    return torch.exp(-0.5 * ((x.unsqueeze(-1) - centers) / spread).square()).flatten(-2)


def _real_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of an encoding of values that may be whole numbers."""
    if x.is_complex():
        raise TypeError(f"x is {x.dtype}: expected real numbers")
    return x.dtype if x.is_floating_point() else torch.get_default_dtype()


def _check(x: Tensor, num_steps: int) -> None:
    check_tensor("x", x, " [B, ...]")
    if x.ndim == 0:
        raise ValueError("x has no dimensions: expected [B, ...]")
    integer("num_steps", num_steps)
