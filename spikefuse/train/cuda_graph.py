"""Training steps replayed as one CUDA graph: the host launches one thing instead of thousands.

Recorded is the whole step: encoding, forward, backward, clipping and the optimizer. Random numbers
stay those of the eager step, for a replay reads the seed and the offset that PyTorch's generator
has at that moment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# Steps before the recording: they compile kernels, choose algorithms, and make the optimizer's
# state, none of which a recording may do.
EAGER_STEPS = 3

Result = tuple[Tensor, ...]


class GraphedStep:
    """Runs a training step eagerly a few times, records the next, and replays it from then on.

    A batch of another shape than the recorded one runs eagerly. The result of a replay is
    overwritten by the next.

    Args:
        step: one whole training step on (inputs, labels), which does not wait for the GPU.
        optimizer: the one that `step` uses, fused; it is made to read its learning rate from a
            tensor.
    """

    def __init__(self, step: Callable[[Tensor, Tensor], Result], optimizer: Optimizer) -> None:
        self.step = step
        self.done = 0
        self.stream = torch.cuda.Stream()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs, self.labels = torch.empty(0), torch.empty(0)
        self.result: Result = ()
        for group in optimizer.param_groups:
            device = group["params"][0].device
            group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32, device=device)
            if "capturable" in group:
                group["capturable"] = True

    def __call__(self, counted: Any, inputs: Tensor, labels: Tensor) -> Result:
        """One step.

        Args:
            counted: Lightning's wrapper of the optimizer, which counts the steps.
            inputs, labels: a batch on the GPU.
        """
        counted._on_before_step()
        if self.graph is None and self.done >= EAGER_STEPS:
            self._record(inputs, labels)
        if self.graph is None or not self._fits(inputs, labels):
            result = self._eager(inputs, labels)
        else:
            self.inputs.copy_(inputs)
            self.labels.copy_(labels)
            self.graph.replay()
            result = self.result
        self.done += 1
        counted._on_after_step()
        return result

    def _fits(self, inputs: Tensor, labels: Tensor) -> bool:
        return inputs.shape == self.inputs.shape and labels.shape == self.labels.shape

    def _eager(self, inputs: Tensor, labels: Tensor) -> Result:
        # On a stream of its own, as a recording is: what autograd ties to a stream stays clear of
        # the default one.
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = self.step(inputs, labels)
        torch.cuda.current_stream().wait_stream(self.stream)
        return result

    def _record(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs, self.labels = inputs.clone(), labels.clone()
        graph = torch.cuda.CUDAGraph()
        # Another thread may be fetching batches, and is not part of this.
        mode = "thread_local"
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode=mode):
            self.result = self.step(self.inputs, self.labels)
        self.graph = graph
