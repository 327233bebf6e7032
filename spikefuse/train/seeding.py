"""Random choices as pure functions of the run's seed and of where in the run they are made.

A run that is resumed at step n therefore continues as if it had never stopped: nothing random
has to be saved.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from torch import Tensor


class Purpose(IntEnum):
    """What the random numbers are for: each purpose has its own, independent ones."""

    WEIGHTS = 0
    ORDER = 1
    STEP = 2
    EVALUATION = 3


def derive(seed: int, purpose: Purpose, index: int = 0) -> int:
    """A seed of 64 bits from the run's seed, a purpose and a count."""
    sequence = np.random.SeedSequence([seed, purpose, index])
    return int(sequence.generate_state(1, np.uint64)[0])


def reseed(seed: int, purpose: Purpose, index: int = 0) -> None:
    """Set PyTorch's own random numbers, on every device."""
    torch.manual_seed(derive(seed, purpose, index))


def order(count: int, seed: int, epoch: int) -> Tensor:
    """The order in which epoch `epoch` (from 0) visits `count` images."""
    generator = torch.Generator().manual_seed(derive(seed, Purpose.ORDER, epoch))
    return torch.randperm(count, generator=generator)
