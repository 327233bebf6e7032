"""Values whose sums of products are exact, so that they do not depend on the order of addition.

Matrix products and convolutions add in an order that depends on the machine and on the batch size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

# Values on this grid, and sums of a few hundred of their products, are exact in float32 in any
# order, and most in bfloat16.
GRID = 1 / 64

Module = TypeVar("Module", bound=nn.Module)


def on_grid(
    shape: Sequence[int], device: str = "cpu", seed: int = 0, spread: float = 0.5
) -> Tensor:
    """Random values on the grid, from -2 to 2."""
    generator = torch.Generator().manual_seed(seed)
    return rounded(torch.randn(shape, generator=generator) * spread).clamp(-2, 2).to(device)


def rounded(x: Tensor) -> Tensor:
    return (x / GRID).round() * GRID


def with_exact_layers(net: Module) -> Module:
    """`net` itself, with the parameters of convolutions and linear layers rounded to the grid."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            for p in module.parameters():
                p.data = rounded(p.data)
    return net
