"""Encodings of a static input `[B, ...]` as a sequence `[T, B, ...]`."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["direct", "poisson"]


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
        TypeError, ValueError: `x` is not a floating-point tensor or has no batch dimension;
            `num_steps` < 1; the generator is on another device.
    """
    _check(x, num_steps)
    if not x.is_floating_point():
        raise TypeError(f"x is {x.dtype}: expected spike probabilities, such as pixels / 255")
    if generator is not None and generator.device.type != x.device.type:
        raise ValueError(
            f"generator is on {generator.device}, x on {x.device}: create it with "
            f"torch.Generator('{x.device}')"
        )
    # Always float32: bfloat16 random numbers have only 8 bits.
    shape = num_steps, *x.shape
    draws = torch.rand(shape, dtype=torch.float32, device=x.device, generator=generator)
    return (draws < x).to(x.dtype)


def _check(x: Tensor, num_steps: int) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}: expected a tensor [B, ...]")
    if x.ndim == 0:
        raise ValueError("x has no dimensions: expected [B, ...]")
    if not isinstance(num_steps, int) or num_steps < 1:
        raise ValueError(f"num_steps is {num_steps!r}: expected an integer of at least 1")
