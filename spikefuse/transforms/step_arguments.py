"""The arguments of a recorded step."""

from __future__ import annotations

from enum import Enum
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

is_cuda = attrgetter("is_cuda")
CONSTANTS = (
    *(bool, int, float, complex, str, bytes, type(None), Enum),
    *(torch.dtype, torch.device, nn.Module, Optimizer),
)


def description(x: Any) -> Any:
    """What a recorded step depends on of one of its arguments.

    Raises:
        TypeError, ValueError: no graph can take it.
    """
    if isinstance(x, Tensor):
        if type(x) is not Tensor or x.layout is not torch.strided:
            raise TypeError(
                f"an argument is a {type(x).__name__} of layout {x.layout}: graph_step takes dense "
                "tensors; let the step use other objects itself"
            )
        if not is_cuda(x):
            raise ValueError(
                f"an argument {list(x.shape)} is on the CPU and another on a GPU: move both to "
                "the GPU before the call"
            )
        if x.requires_grad:
            raise ValueError(
                f"an argument {list(x.shape)} requires a gradient, which graph_step does not "
                "return: compute it inside the step with torch.autograd.grad, from x.detach()"
            )
        broadcast = tuple(stride == 0 for stride in x.stride())
        return x.shape, x.dtype, x.device, broadcast
    if isinstance(x, CONSTANTS):
        return type(x), x
    raise TypeError(
        f"an argument is a {type(x).__name__}: graph_step takes tensors, numbers, strings, modules "
        "and optimizers, in tuples, lists and dicts; let the step use other objects itself"
    )


def static_copy(x: Tensor) -> Tensor:
    """A copy with the same dimensions of stride 0."""
    return stored(x).clone().expand(x.shape)


def stored(x: Tensor) -> Tensor:
    """The part of `x` that is in memory: dimensions of stride 0 have one element."""
    for dim, stride in enumerate(x.stride()):
        if stride == 0 and x.shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    return x
