"""Batch norms of torch.nn that fuse with the neurons that read them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as modules
from torch.nn.modules.batchnorm import _BatchNorm

from spikefuse.block import traced
from spikefuse.block.deferred import (
    DeferredNorm,
    Outcome,
    compute_earlier,
    defer,
    materialized,
    outcomes,
)
from spikefuse.kernels.norm import by_batch
from spikefuse.nn.call import active
from spikefuse.nn.constant_input import ConstantSequence
from spikefuse.nn.neuron import DTYPES
from spikefuse.scan.op import PLAIN

# Values of an input from which a block on a CPU is not slower than separate norm and neuron,
# measured on two cores after a convolution. Smaller inputs stay in the caches.
MIN_VALUES = 5 << 18


class FusedNorm(_BatchNorm):
    """A batch norm that defers its result inside `Temporal`; a mixin over a class of torch.nn.

    Outside `Temporal`, with hooks on its output, in inference mode, under tracers other than
    torch.compile, with small inputs on a CPU, and with inputs that a block does not take, it is the
    norm of torch.nn.
    """

    is_leaf = True

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, DeferredNorm):
            input = materialized(input)
        # Ranks that share time must agree, and PyTorch has no SyncBatchNorm for CPUs.
        shares_time = active.call is not None and active.call.passing is not None
        must_fuse = shares_time or isinstance(self, nn.SyncBatchNorm)
        is_small = not must_fuse and input.is_cpu and input.numel() < MIN_VALUES
        if torch.compiler.is_compiling():
            if active.call is not None and active.call.impl == "reference":
                return super().forward(input)
            return traced.normalize(self, input, not is_small)
        own, buffers = self._parameters, self._buffers
        found: list[Tensor | None] = [input, own.get("weight"), own.get("bias")]
        if not self.training:
            found += [buffers.get("running_mean"), buffers.get("running_var")]
        read = []
        for t in found:
            if t is not None:
                read.append(t)
        obstacle = self._obstacle(input, read, is_small)
        if not obstacle:
            return defer(self, read)
        if active.call is not None:
            known = outcomes.get(self)
            if known is None or known.reason != obstacle:
                outcomes[self] = Outcome(None, reason=obstacle)
            compute_earlier(self)
        return super().forward(input)

    def extra_repr(self) -> str:
        outcome, text = outcomes.get(self), super().extra_repr()
        if outcome is None:
            return text
        if outcome.neuron is None:
            return f"{text}, not fused: {outcome.reason}"
        residual = "a residual and " if outcome.residual else ""
        return f"{text}, fused with {residual}{type(outcome.neuron).__name__}"

    def plain(self, x: Tensor) -> Tensor:
        """The norm of torch.nn, at once."""
        return super().forward(x)

    def _obstacle(self, x: Any, read: list[Tensor], is_small: bool) -> str:
        """Why the norm must be computed at once; empty if it can be deferred. `is_small` says
        whether separate norm and neuron are faster than a block."""
        temporal = active.call
        # torch.utils.checkpoint recomputes in a backward pass what Temporal has called.
        if temporal is None and torch._C._current_graph_task_id() == -1:
            return "it was called outside Temporal"
        if temporal is not None and not temporal.names:
            return "the network has no neuron"
        if is_small:
            return _too_small(x.numel(), MIN_VALUES)
        if (
            self._forward_hooks
            or self._backward_hooks
            or self._backward_pre_hooks
            or modules._global_backward_hooks
            or modules._global_backward_pre_hooks
        ):
            return "it has hooks"
        if torch.is_inference_mode_enabled():
            return "it was called in inference mode, whose tensors do not count their changes"
        if (
            forward_ad._current_level >= 0
            or torch._C._get_tracing_state() is not None
            or torch._C._functorch.peek_interpreter_stack()
            or (torch._C._len_torch_dispatch_stack() and _has_fake_mode())
        ):
            return "it is traced or transformed"
        if isinstance(x, ConstantSequence):
            return "its input is the same at each step, so it is computed once"
        device = x.device
        for t in read:
            if type(t) not in PLAIN or t.dtype not in DTYPES or t.device != device:
                return f"it reads a {type(t).__name__} that a block does not take"
            if t.is_inference():
                return "it reads a tensor of inference mode"
        if "weight" not in self._parameters or "bias" not in self._parameters:
            return "its parameters are parametrized"
        if not (x.is_cuda or x.is_cpu) or x.layout is not torch.strided or x.numel() == 0:
            return "its input is empty, or not a dense tensor on a CPU or a GPU"
        if not isinstance(self.momentum, (float, int, type(None))):
            return f"its momentum is {self.momentum!r}"
        self._check_input_dim(x)
        shape = x.shape
        passing = None if temporal is None else temporal.passing
        alone = passing is None or passing.statistics is None
        if shape[1] != self.num_features or (alone and x.numel() == shape[1] and by_batch(self)):
            return f"its input has shape {list(shape)}"
        if temporal is None or shape[0] % temporal.num_steps == 0:
            return ""
        return f"its input has {shape[0]} rows, which is not T * B"


class FusedBatchNorm1d(FusedNorm, nn.BatchNorm1d):
    pass


class FusedBatchNorm2d(FusedNorm, nn.BatchNorm2d):
    pass


class FusedBatchNorm3d(FusedNorm, nn.BatchNorm3d):
    pass


class FusedSyncBatchNorm(FusedNorm, nn.SyncBatchNorm):
    pass


@lru_cache(maxsize=512)
def _too_small(number: int, fewest: int) -> str:
    return f"its input has {number:,} values: on a CPU, fusing helps from {fewest:,}"


def _has_fake_mode() -> bool:
    """Whether a mode of fake or proxy tensors records what is computed."""
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
