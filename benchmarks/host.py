"""What the host pays at least for a custom operation: an autograd.Function whose forward and
backward launch one Triton kernel each, and do nothing else."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks import layer
from benchmarks.runner import Contender


@triton.jit
def _copy(source, target, size, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + index, tl.load(source + index, mask=index < size), mask=index < size)


def _copied(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _copy[(triton.cdiv(x.numel(), 128),)](x, y, x.numel(), BLOCK=128)
    return y


class _Bare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _copied(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _copied(grad)


def bare(name: str, inputs: layer.Inputs) -> Contender:
    return layer.contender(name, _Bare.apply, inputs, "two trivial Triton launches")
