"""Random steps of neurons against the eager loop: any T, dtype and layout, forward and backward."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from tests.compiler.definitions import CHANNELS, differences, interpreted

DTYPES = (torch.float32, torch.float32, torch.bfloat16)
COMPILED = 20  # one of so many, because it takes seconds


def laid_out(x: Tensor, rng: random.Random) -> Tensor:
    """Give `x` another order of dimensions in memory, gaps, or one value for all steps."""
    form = rng.choice(("same", "order", "gaps", "constant", "transposed"))
    if form == "order":
        order = rng.sample(range(x.ndim), x.ndim)
        back = sorted(range(x.ndim), key=order.__getitem__)
        return x.permute(order).contiguous().permute(back)
    if form == "gaps":
        dim, step = rng.randrange(x.ndim), rng.choice((2, 3))
        return x.repeat_interleave(step, dim)[(slice(None),) * dim + (slice(None, None, step),)]
    if form == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    return x[:1].expand_as(x) if form == "constant" else x


def case(seed: int) -> list[str]:
    rng = random.Random(seed)
    sizes = [rng.randint(1, 6) for _ in range(rng.randint(0, 2))]
    shape = (rng.choice((1, 1, 2, 3, 5, 8, 17)), rng.randint(1, 3), CHANNELS, *sizes)
    dtype = rng.choice(DTYPES)
    with contextlib.ExitStack() as stack:
        # Thousands of files that no other process needs.
        own = {"SPIKEFUSE_CACHE_DIR": str(Path.cwd() / "definitions")}
        stack.enter_context(mock.patch.dict(os.environ, own))
        if rng.randrange(COMPILED):
            stack.enter_context(interpreted())
        return differences(seed, "numba", "cpu", shape, lambda x: laid_out(x.to(dtype), rng))
