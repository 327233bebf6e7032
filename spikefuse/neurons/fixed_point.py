"""Numbers in fixed point, as chips hold them."""

from __future__ import annotations

import torch
from torch import Tensor


def fixed_point(value: Tensor, step: Tensor, low: int, high: int) -> Tensor:
    """Round to `k * step`, where k is floor(value / step + 1/2), but saturates at `low` and `high`.
    Gradients pass where it does not (straight-through estimator)."""
    u = value / step
    clipped = torch.clamp(u, min=low, max=high).detach()
    # The derivative of clamp at its bounds depends on the version of PyTorch.
    u = torch.where(clipped == u, u, clipped)
    # The difference is 0, so that adding it rounds nothing, and has the derivative of u.
    return (torch.floor(clipped + 0.5) + (u - u.detach())) * step
