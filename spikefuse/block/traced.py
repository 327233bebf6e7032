"""Batch norms inside torch.compile, which become blocks with the neurons that read them.

While a network is traced, a fused norm returns the plain normalized tensor and records what it was
computed from. If a neuron reads that tensor, or its sum with a residual, a block takes the place of
both in the graph, and the compiler removes the plain norm, which nothing reads then.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from spikefuse.block.batch_norm import update_traced_stats
from spikefuse.block.block import can_normalize_residual, scan
from spikefuse.kernels.norm import by_batch
from spikefuse.neurons.definition import Neuron
from spikefuse.nn.call import Scan, active
from spikefuse.nn.neuron import DTYPES


class TracedNorm:
    """The call of a norm in a traced graph, perhaps with a residual.

    Attributes:
        x: what the norm reads, `[T*B, C, ...]`.
        statistics: mean and variance of the batch; None with running statistics.
        pending: the calls that no neuron has read yet.
    """

    def __init__(
        self,
        norm: _BatchNorm,
        x: Tensor,
        statistics: tuple[Tensor, Tensor] | None,
        pending: list[TracedNorm],
    ) -> None:
        self.norm, self.x, self.statistics, self.pending = norm, x, statistics, pending
        self.residual: Tensor | None = None
        self.of_residual: TracedNorm | None = None
        self.origin, self.grad = self, torch.is_grad_enabled()

    def block(self, neuron: Neuron) -> tuple[Scan, tuple[Tensor, ...]]:
        norms: tuple[_BatchNorm, ...] = (self.norm,)
        inputs = (self.x,) if self.residual is None else (self.x, self.residual)
        other = self.of_residual
        self._drop(self.origin)
        if other is not None and any(pending is other for pending in self.pending):
            self._drop(other)
            norms, inputs = (self.norm, other.norm), (self.x, other.x)
        return partial(scan, norms, neuron, None), inputs

    def _drop(self, read: TracedNorm) -> None:
        """Drop a call that a block has read."""
        self.pending[:] = [call for call in self.pending if call is not read]

    def can_fuse(self, neuron: Neuron) -> bool:
        call = active.call
        return (
            len(type(neuron).input_names) == 1
            and call is not None
            and id(neuron) in call.names
            and self.grad == torch.is_grad_enabled()
            and any(pending is self.origin for pending in self.pending)
        )

    def extended(self, other: Any, norms: list[TracedNorm]) -> TracedNorm | None:
        """The sum with a residual, which is the result of one of `norms`, if there are any."""
        x = self.x
        if (
            self.residual is not None
            or not isinstance(other, Tensor)
            or (other.shape, other.dtype, other.device) != (x.shape, x.dtype, x.device)
        ):
            return None
        call = TracedNorm(self.norm, x, self.statistics, self.pending)
        call.residual, call.origin, call.grad = other, self.origin, self.grad
        for norm in norms:
            fits = norm.residual is None and norm.grad == self.grad and norm is not self
            if fits and can_normalize_residual(self.norm, norm.norm):
                call.of_residual = norm
        return call


class TracedNorms:
    """The norms of a traced call of `Temporal`, as `deferred.Deferrals` in other calls."""

    def __init__(self) -> None:
        self.pending: list[TracedNorm] = []

    def finish(self, norm: _BatchNorm | None = None) -> None:
        """Update the running statistics of calls that no block has read, of `norm` or of all."""
        left = []
        for call in self.pending:
            if norm is not None and call.norm is not norm:
                left.append(call)
            elif call.statistics is not None:
                mean, variance = call.statistics
                number = call.x.numel() / call.x.shape[1]
                update_traced_stats(call.norm, mean, variance * (number / (number - 1)))
        self.pending[:] = left

    def close(self) -> None:
        self.pending.clear()


def normalize(norm: Any, x: Tensor, is_faster: bool) -> Tensor:
    """The result of a `FusedNorm` in a traced graph; `is_faster` says whether a block is faster."""
    call = active.call
    # In graphs of parts of the network, nothing watches for changes between a norm and its neuron.
    if call is None or call.sums is None:
        return norm.plain(x)
    if call.deferred is not None:
        assert isinstance(call.deferred, TracedNorms)
        call.deferred.finish(norm)  # an earlier call of it
    if not call.names or not is_faster or not _can_trace(norm, x):
        return norm.plain(x)
    if call.deferred is None:
        call.deferred = TracedNorms()
    pending, statistics = call.deferred.pending, None
    if by_batch(norm):
        # Without running statistics: these are updated by a block, or at the end.
        y, mean, inverse = torch.native_batch_norm(
            x, norm.weight, norm.bias, None, None, True, 0.0, norm.eps
        )
        statistics = mean.detach(), 1 / inverse.detach().square() - norm.eps
        if x.dtype != torch.float32:  # in which PyTorch may round them
            dims = [0, *range(2, x.ndim)]
            variance, mean = torch.var_mean(x.detach().float(), dims, correction=0)
            statistics = mean, variance
    else:
        y = norm.plain(x)
    traced = TracedNorm(norm, x, statistics, pending)
    pending.append(traced)
    call.sums.append((y, traced))
    return y


def _can_trace(norm: Any, x: Tensor) -> bool:
    return not (
        norm._forward_hooks
        or norm._backward_hooks
        or norm._backward_pre_hooks
        or x.dtype not in DTYPES
        or x.ndim < 2
        or "weight" not in norm._parameters
        or (norm.weight is not None and norm.weight.dtype != torch.float32)
        or not isinstance(norm.momentum, float)
        or (isinstance(norm, nn.SyncBatchNorm) and dist.is_initialized())
    )
