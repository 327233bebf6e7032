"""Batch normalization by the statistics of several ranks, each weighted by its number of values."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from spikefuse.block.batch_norm import RankedNorm
from spikefuse.block.fused_norm import FusedNorm
from spikefuse.distributed.links import Ranks
from spikefuse.nn.neuron import calls

# The kernels give 1 / sqrt(variance + this).
_EPS = 1e-5


class AxisNorm(RankedNorm):
    """A batch norm that in training takes its statistics over all ranks of a group.

    The result is that of one process that has all the values, running statistics included, to
    rounding. Forward it gathers 2C + 1 numbers of each rank and backward it sums 2C: neither
    blocks the host of a GPU, but both wait for the slowest rank.

    Args:
        norm: whose parameters, buffers and settings it shares.
        ranks: over which.
    """

    def __init__(self, norm: _BatchNorm, ranks: Ranks) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(norm.__dict__)
        self.ranks = ranks

    def _check_input_dim(self, x: Tensor) -> None:
        if x.ndim < 2:
            raise ValueError(f"a batch norm received shape {list(x.shape)}: expected [N, C, ...]")

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return super().forward(x)
        self._check_input_dim(x)
        sequence, repeats = calls.sequence, 1
        if sequence is not None and x.shape[0] == sequence.constant_rows:
            repeats = sequence.num_steps  # rows that stand for all steps count as often
        y, mean, var, count = _Normalize.apply(
            x, self.weight, self.bias, self.eps, repeats, self.ranks
        )
        if self.training and self.track_running_stats and self.running_mean is not None:
            self._track(mean, var * (count / (count - 1)))
        return y

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor) -> None:
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked.add_(1)
        rate: float | Tensor
        if self.momentum is None:  # a plain mean over all batches
            rate = (1 / self.num_batches_tracked).to(mean.dtype)
        else:
            rate = torch.full_like(mean, self.momentum)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
        self.running_var.lerp_(var.to(self.running_var.dtype), rate)


class FusedAxisNorm(FusedNorm, AxisNorm):
    pass


def share_statistics(net: nn.Module, ranks: Ranks) -> None:
    """Put an `AxisNorm` in the place of every batch norm inside. A `torch.nn.SyncBatchNorm` has
    ranks of its own and stays."""
    for module in list(net.modules()):
        for name, child in module.named_children():
            if isinstance(child, _BatchNorm) and not isinstance(child, nn.SyncBatchNorm):
                kind = FusedAxisNorm if isinstance(child, FusedNorm) else AxisNorm
                setattr(module, name, kind(child, ranks))


def average_statistics(net: nn.Module, ranks: Ranks) -> None:
    """Let the running statistics of the batch norms inside be, after each call in training, the
    mean of all ranks'."""

    def average(net: nn.Module, *_: Any) -> None:
        norms = [m for m in net.modules() if isinstance(m, _BatchNorm) and m.training]
        buffers = [b for m in norms for b in (m.running_mean, m.running_var) if b is not None]
        if not buffers:
            return
        flat = torch.cat([b.detach() for b in buffers])
        ranks.sum(flat)
        parts = (flat / ranks.size).split([len(b) for b in buffers])
        # Not a change that autograd should see: backward in training does not use it.
        torch._foreach_copy_([b.data for b in buffers], list(parts))

    net.register_forward_hook(average)


class _Normalize(torch.autograd.Function):
    """y = (x - m) / sqrt(v + eps) * w + b with mean m and variance v per channel over all ranks.

    With n values in all, g the gradient of y and z the normalised x, backward is
    grad_x = w / sqrt(v + eps) * (g - sum(g) / n - z * sum(g * z) / n), its sums over all ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        repeats: int,
        ranks: Ranks,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, var, count = _moments(x, repeats, ranks)
        y = F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + eps), count)
        ctx.repeats, ctx.ranks = repeats, ranks
        ctx.mark_non_differentiable(mean, var, count)
        return y, mean, var, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale, count = ctx.saved_tensors
        sums, products = _sums(grad, x, mean, scale)
        total = torch.stack([sums, products])
        ctx.ranks.sum(total)
        # The gradient of a row that stands for several steps is the sum of theirs.
        shares = ctx.repeats * total / count
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = _grad_x(grad, x, mean, scale, weight, (shares[0], shares[1]))
        wanted = ctx.needs_input_grad[1:3]
        return (
            grad_x,
            products.to(weight.dtype) if wanted[0] else None,
            sums.to(weight.dtype) if wanted[1] else None,
            *(None,) * 3,
        )


def _moments(x: Tensor, repeats: int, ranks: Ranks) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance per channel over all ranks, and the number of values."""
    if x.is_cuda:
        mean, scale = torch.batch_norm_stats(_dense(x), _EPS)
        var = (scale.pow(-2) - _EPS).clamp_min(0)
    else:
        var, mean = torch.var_mean(x.float(), _others(x), correction=0)
    values = repeats * x.numel() // x.shape[1]
    mine = torch.cat([mean, var, mean.new_full((1,), values)])
    means, variances, counts = ranks.gather(mine).split([len(mean), len(var), 1], 1)
    count = counts.sum()
    weights = counts / count
    mean = (weights * means).sum(0)
    return mean, (weights * (variances + (means - mean).square())).sum(0), count


def _sums(grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Per channel: the sum of the gradient, and of the gradient times the normalised x."""
    if x.is_cuda:
        arguments = _dense(grad), _dense(x), mean, scale, None, True, False, False
        sums, products, _, _ = torch.batch_norm_backward_reduce(*arguments)
        return sums, products * scale
    shape = (1, -1, *(1,) * (x.ndim - 2))
    g, dims = grad.float(), _others(x)
    return g.sum(dims), (g * (x - mean.view(shape))).sum(dims) * scale


def _grad_x(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    shares: tuple[Tensor, Tensor],
) -> Tensor:
    """weight * scale * (grad - shares[0] - z * shares[1]), z the normalised x."""
    if x.is_cuda:
        one = torch.ones(1, dtype=torch.int32, device=x.device)
        return torch.batch_norm_backward_elemt(
            _dense(grad), _dense(x), mean, scale, weight, shares[0], shares[1] / scale, one
        )
    shape = (1, -1, *(1,) * (x.ndim - 2))
    slope = scale if weight is None else scale * weight
    of_x = -slope * scale * shares[1]
    of_grad, of_x, rest = (p.view(shape) for p in (slope, of_x, -slope * shares[0] - of_x * mean))
    return torch.addcmul(rest, grad.float(), of_grad).addcmul_(x.float(), of_x).to(x.dtype)


def _dense(x: Tensor) -> Tensor:
    """As the kernels of batch normalization take it."""
    if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return x
    return x.contiguous()


def _others(x: Tensor) -> list[int]:
    return [d for d in range(x.ndim) if d != 1]
