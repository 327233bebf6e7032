"""Batch normalization over several ranks, each weighted by its number of values."""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spikefuse.block import batch_norm
from spikefuse.block.batch_norm import Affine
from spikefuse.distributed import collectives
from spikefuse.distributed.links import AxisCollectives
from spikefuse.kernels.norm import BatchNorm, by_batch
from spikefuse.kernels.running import Running, update_running_stats
from spikefuse.neurons.checks import is_plain
from spikefuse.nn.call import active
from spikefuse.scan.checks import call_untraced
from spikefuse.scan.state_passing import Collectives

# torch.batch_norm_stats returns 1 / sqrt(variance + eps).
_EPS = 1e-5


class AxisNorm(nn.BatchNorm1d):
    """A batch norm whose training statistics include all ranks of an axis.

    The result is that of one process with all values, to rounding, running statistics included.
    Forward gathers 2C + 1 numbers per rank, and backward sums 2C. The host of a GPU does not block,
    but its stream waits for the slowest rank. Parameters, buffers and settings are those of `norm`.
    """

    ranks: Collectives | None

    def __init__(self, norm: BatchNorm, ranks: AxisCollectives) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(norm.__dict__)
        self.ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2:
            raise ValueError(f"a batch norm received shape {list(x.shape)}: expected [N, C, ...]")
        mean, variance, affine = self.running_mean, self.running_var, (self.weight, self.bias)
        if not by_batch(self):
            return F.batch_norm(x, mean, variance, *affine, eps=self.eps)
        running = Running()
        if self.training and self.track_running_stats:
            batches: Tensor | None = self.num_batches_tracked
            rate: Any = self.momentum
            if rate is None and batches is not None:
                # The mean over all batches, computed without waiting for a GPU.
                rate = 1 / (batches + 1)
            running = Running(mean, variance, batches, rate)
        # In our graphs `F.batch_norm` stands for a norm over all ranks. It refuses one value per
        # channel, although other ranks may hold more, and a momentum that is a tensor.
        is_capturable = x.numel() > x.shape[1] and not isinstance(running.momentum, Tensor)
        if active.captures and is_capturable and not is_plain((x,)):
            if running.batches is not None:
                running.batches.add_(1)
            return self._in_graph(x, *running[:2], *affine, True, running.momentum, self.eps)
        # TorchDynamo would replace the exchanges by others.
        return call_untraced(normalize, x, running, (*affine, self.eps), self._collectives())

    def _in_graph(self, x: Tensor, *given: Any) -> Tensor:
        return F.batch_norm(x, *given)

    def _collectives(self) -> Collectives | None:
        passing = None if active.call is None else active.call.passing
        # Those of a checkpoint gather once.
        return (passing and passing.statistics) or self.ranks


class SyncNorm(AxisNorm, nn.SyncBatchNorm):
    """`nn.SyncBatchNorm` that runs on a CPU, too, and of which TorchDynamo sees a batch norm."""

    def __new__(cls, *args: Any) -> Self:
        # Copies and unpickled norms have no other moment in common.
        norm = super().__new__(cls)
        batch_norm.synchronized[id(norm)] = norm
        torch.compiler.allow_in_graph(batch_norm.synchronized_batch_norm)
        return norm

    def __init__(self, norm: nn.SyncBatchNorm) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(norm.__dict__)

    def _in_graph(self, x: Tensor, *given: Any) -> Tensor:
        if not self.training:  # without running statistics; PyTorch's does not synchronize then
            return F.batch_norm(x, *given)
        return batch_norm.synchronized_batch_norm(x, *given, norm=id(self))

    def _collectives(self) -> Collectives | None:
        return collectives.group_of(self) if self.training else None


def normalize(
    x: Tensor,
    running: Running,
    affine: Affine,
    ranks: Collectives | None,
) -> Tensor:
    """A batch norm with the statistics of all ranks, by which it updates `running`; `affine` is
    (weight, bias, eps), and `ranks` None for this process alone."""
    if ranks is None:
        if running.batches is not None:
            running.batches.add_(1)
        weight, bias, eps = affine
        rate = float(running.momentum)
        return F.batch_norm(x, running.mean, running.variance, weight, bias, True, rate, eps)
    y, mean, var, count = _NormalizeOverRanks.apply(x, *affine, ranks)
    with torch.no_grad():
        update_running_stats(running, mean, var * (count / (count - 1)))
    return y


batch_norm.traceable, batch_norm.normalize = SyncNorm, normalize


def share_statistics(net: nn.Module, ranks: AxisCollectives) -> None:
    """Replace every batch norm inside `net` by an `AxisNorm`, except `torch.nn.SyncBatchNorm`,
    which has its own ranks."""
    for module in list(net.modules()):
        for name, child in module.named_children():
            if isinstance(child, BatchNorm) and not isinstance(child, nn.SyncBatchNorm):
                setattr(module, name, AxisNorm(child, ranks))


def average_statistics(net: nn.Module, ranks: AxisCollectives) -> None:
    """Average running statistics of the norms in `net` over all ranks after each training call."""

    def average(net: nn.Module, *_: Any) -> None:
        norms = [m for m in net.modules() if isinstance(m, BatchNorm) and m.training]
        buffers = [b for m in norms for b in (m.running_mean, m.running_var) if b is not None]
        if not buffers:
            return
        flat = torch.cat([b.detach() for b in buffers])
        ranks.sum(flat)
        means = (flat / ranks.size).split([len(b) for b in buffers])
        # Hidden from autograd, whose backward in training does not use the buffers.
        for buffer, mean in zip(buffers, means, strict=True):
            buffer.data.copy_(mean)

    net.register_forward_hook(average)


class _NormalizeOverRanks(torch.autograd.Function):
    """y = (x - m) / sqrt(v + eps) * w + b with mean m and variance v per channel over all ranks.

    For n values in total, g the gradient of y and z the normalized x, backward is
    grad_x = w / sqrt(v + eps) * (g - sum(g) / n - z * sum(g * z) / n), with sums over all ranks.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
        bias, eps, ranks = args
        mean, var, count = _moments(x, ranks)
        y = F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + eps), count)
        ctx.ranks = ranks
        ctx.mark_non_differentiable(mean, var, count)
        return y, mean, var, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale, count = ctx.saved_tensors
        sums, products = _sums(grad, x, mean, scale)
        total = torch.stack([sums, products])
        ctx.ranks.sum(total)
        means = total / count
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        return (
            _grad_x(grad, x, weight, (mean, scale), means) if needs_x else None,
            products.to(weight.dtype) if needs_weight else None,
            sums.to(weight.dtype) if needs_bias else None,
            *(None,) * 2,
        )


def _moments(x: Tensor, ranks: Collectives) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and variance per channel over all ranks, and the number of values."""
    if x.is_cuda:
        mean, scale = torch.batch_norm_stats(_dense(x), _EPS)
        var = (scale.pow(-2) - _EPS).clamp_min(0)
    else:
        var, mean = torch.var_mean(x.movedim(1, -1).float(), _leading(x), correction=0)
    values = x.numel() // x.shape[1]
    mine = torch.cat([mean, var, mean.new_full((1,), values)])
    means, variances, counts = ranks.gather(mine).split([len(mean), len(var), 1], 1)
    count = counts.sum()
    weights = counts / count
    mean = (weights * means).sum(0)
    return mean, (weights * (variances + (means - mean).square())).sum(0), count


def _sums(grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the gradient, and the gradient times the normalized x, over each channel."""
    if x.is_cuda:
        arguments = _dense(grad), _dense(x), mean, scale, None, True, False, False
        sums, products, _, _ = torch.batch_norm_backward_reduce(*arguments)
        return sums, products * scale
    g, centered = grad.movedim(1, -1).float(), x.movedim(1, -1) - mean
    return g.sum(_leading(x)), (g * centered).sum(_leading(x)) * scale


def _grad_x(
    grad: Tensor, x: Tensor, weight: Tensor | None, moments: tuple[Tensor, Tensor], means: Tensor
) -> Tensor:
    """Return weight * scale * (grad - means[0] - z * means[1]), where z is the normalized x."""
    mean, scale = moments
    if x.is_cuda:
        one = torch.ones(1, dtype=torch.int32, device=x.device)
        return torch.batch_norm_backward_elemt(
            _dense(grad), _dense(x), mean, scale, weight, means[0], means[1] / scale, one
        )
    slope = scale if weight is None else scale * weight
    mean_terms = (x.movedim(1, -1) - mean) * (scale * means[1]) + means[0]
    grad_x = slope * (grad.movedim(1, -1) - mean_terms)
    return grad_x.movedim(-1, 1).to(x.dtype)


def _dense(x: Tensor) -> Tensor:
    """Return `x` in a memory layout that PyTorch's batch norm kernels accept."""
    if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return x
    return x.contiguous()


def _leading(x: Tensor) -> list[int]:
    """Return all dimensions but the last, to which the channels have been moved."""
    return list(range(x.ndim - 1))
