"""Batch norms of torch.nn that fuse with the neurons that read them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as modules
from torch.nn.modules.batchnorm import _BatchNorm

from spikefuse.block.batch_norm import RankedNorm, by_batch
from spikefuse.block.deferred import Outcome, defer, materialized, outcomes, tensors_of
from spikefuse.nn import constant_input
from spikefuse.nn.call import TemporalCall, active
from spikefuse.nn.neuron import DTYPES


class FusedNorm(_BatchNorm):
    """A batch norm that defers its result inside `Temporal`; a mixin over a class of torch.nn.

    Outside `Temporal`, with hooks on its output, in a graph of torch.compile or another tracer, in
    inference mode, and on inputs that a block does not take, it is the norm of torch.nn.
    """

    is_leaf = True
    counts_steps = True

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self.plain(input)
        input = materialized(input)
        if not self._defers(input):
            if active.call is not None:
                outcomes[self] = Outcome(None, reason=self._reason())
            return self.plain(input)
        return defer(self, self.plain, input)

    def plain(self, x: Tensor) -> Tensor:
        """The norm of torch.nn, at once."""
        temporal = active.call
        if (
            torch.compiler.is_compiling()
            or temporal is None
            or temporal.constant_rows is None
            or temporal.constant_rows != x.shape[0]
            or isinstance(self, RankedNorm)
        ):
            return super().forward(x)
        with constant_input.repeated_statistics(self, x, temporal.num_steps):
            return super().forward(x)

    def _defers(self, x: Any) -> bool:
        temporal = active.call
        if temporal is None:
            # torch.utils.checkpoint recomputes in a backward pass what Temporal has called.
            if torch._C._current_graph_task_id() == -1:
                return False
        elif not temporal.names:
            return False
        if not isinstance(x, Tensor):
            return False
        if self._has_hooks() or _is_traced() or torch.is_inference_mode_enabled():
            return False
        if forward_ad._current_level >= 0 or not self._takes(x, temporal):
            return False
        device = x.device
        for t in tensors_of(self, x):
            if type(t) not in _PLAIN or t.is_inference():
                return False
            if t is not x and (t.dtype not in DTYPES or t.device != device):
                return False
        return True

    def _has_hooks(self) -> bool:
        return bool(
            self._forward_hooks
            or self._backward_hooks
            or self._backward_pre_hooks
            or modules._global_backward_hooks
            or modules._global_backward_pre_hooks
        )

    def _reason(self) -> str:
        if self._has_hooks():
            return "it has hooks"
        if torch.is_inference_mode_enabled():
            return "it was called in inference mode, whose tensors don't count their changes"
        return "its input or its settings are not those of a block"

    def _takes(self, x: Tensor, temporal: TemporalCall | None) -> bool:
        if x.dtype not in DTYPES or not (x.is_cuda or x.is_cpu) or x.layout is not torch.strided:
            return False
        if not isinstance(self.momentum, (float, int, type(None))) or x.numel() == 0:
            return False
        self._check_input_dim(x)
        rows, channels = x.shape[:2]
        if channels != self.num_features or (by_batch(self) and x.numel() == channels):
            return False
        if temporal is None or rows == temporal.constant_rows:
            return True
        return rows % temporal.num_steps == 0


class FusedBatchNorm1d(FusedNorm, nn.BatchNorm1d):
    pass


class FusedBatchNorm2d(FusedNorm, nn.BatchNorm2d):
    pass


class FusedBatchNorm3d(FusedNorm, nn.BatchNorm3d):
    pass


class FusedSyncBatchNorm(FusedNorm, nn.SyncBatchNorm):
    pass


_PLAIN = (Tensor, nn.Parameter)


def _is_traced() -> bool:
    """Whether TorchScript, a transform of functions, or a mode of fake or proxy tensors records
    what is computed."""
    if torch._C._get_tracing_state() is not None or torch._C._functorch.peek_interpreter_stack():
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    keys = torch._C._TorchDispatchModeKey
    modes = (keys.FAKE, keys.PROXY, keys.FUNCTIONAL)
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in modes)


#: The class that takes the place of each class of torch.nn.
FUSED: dict[type[nn.Module], type[FusedNorm]] = {
    nn.BatchNorm1d: FusedBatchNorm1d,
    nn.BatchNorm2d: FusedBatchNorm2d,
    nn.BatchNorm3d: FusedBatchNorm3d,
    nn.SyncBatchNorm: FusedSyncBatchNorm,
}
