"""Derive all random choices from the seed and the position in the run.

A run resumed at step n therefore continues exactly, without any saved generator state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor


class Purpose(IntEnum):
    """What random numbers are used for; each purpose has an independent stream."""

    WEIGHTS = 0
    ORDER = 1
    STEP = 2
    EVALUATION = 3


def derive(seed: int, purpose: Purpose, index: int = 0) -> int:
    """Derive a 64-bit seed from the run's seed, a purpose and an index."""
    sequence = np.random.SeedSequence([seed, purpose, index])
    return int(sequence.generate_state(1, np.uint64)[0])


def reseed(seed: int, purpose: Purpose, index: int = 0) -> None:
    """Seed PyTorch's global generators on all devices."""
    torch.manual_seed(derive(seed, purpose, index))


@contextlib.contextmanager
def reseeded(seed: int, purpose: Purpose, index: int, device: torch.device) -> Iterator[None]:
    """Seed PyTorch's global generators for a block, and then restore their states.

    These are the generator of the CPU, from which a `DataLoader` draws the order of an epoch, and
    that of a CUDA `device`.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        reseed(seed, purpose, index)
        yield


def order(count: int, seed: int, epoch: int) -> Tensor:
    """Return the order in which `epoch`, counted from 0, visits `count` examples."""
    generator = torch.Generator().manual_seed(derive(seed, Purpose.ORDER, epoch))
    return torch.randperm(count, generator=generator)
