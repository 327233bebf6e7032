"""Training steps recorded as a CUDA graph, so that the host launches one graph per step.

The graph holds the whole step: encoding, forward, backward, clipping and the optimizer. Its random
numbers equal those of an eager step, because a replay reads the current seed and offset of
PyTorch's generator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# Eager steps before the recording compile kernels, choose algorithms and create optimizer state,
# none of which may happen while recording.
EAGER_STEPS = 3

StepResult = tuple[Tensor, ...]


class GraphedStep:
    """Run a training step eagerly a few times, record the next one, then replay it.

    A batch whose shape differs from the recorded one runs eagerly. Each replay overwrites the
    result of the previous one.

    Args:
        step: one whole training step on (inputs, labels), without synchronization.
        optimizer: the fused optimizer of `step`; its learning rate is moved to a tensor.
    """

    def __init__(self, step: Callable[[Tensor, Tensor], StepResult], optimizer: Optimizer) -> None:
        self.step = step
        self.done = 0
        self.stream = torch.cuda.Stream()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs, self.labels = torch.empty(0), torch.empty(0)
        self.result: StepResult = ()
        for group in optimizer.param_groups:
            device = group["params"][0].device
            group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32, device=device)
            if "capturable" in group:
                group["capturable"] = True

    def __call__(self, counted: Any, inputs: Tensor, labels: Tensor) -> StepResult:
        """Run one step.

        Args:
            counted: Lightning's wrapper of the optimizer, which counts steps.
            inputs, labels: a batch on the GPU.
        """
        counted._on_before_step()
        if self.graph is None and self.done >= EAGER_STEPS:
            self._record(inputs, labels)
        same = inputs.shape == self.inputs.shape and labels.shape == self.labels.shape
        if self.graph is not None and same:
            self.inputs.copy_(inputs)
            self.labels.copy_(labels)
            self.graph.replay()
            result = self.result
        else:
            result = self._run_eagerly(inputs, labels)
        self.done += 1
        counted._on_after_step()
        return result

    def _run_eagerly(self, inputs: Tensor, labels: Tensor) -> StepResult:
        # On the stream of the recording, because autograd ties gradients to streams.
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = self.step(inputs, labels)
        torch.cuda.current_stream().wait_stream(self.stream)
        return result

    def _record(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs, self.labels = inputs.clone(), labels.clone()
        graph = torch.cuda.CUDAGraph()
        # Thread-local, because another thread may be loading batches.
        mode = "thread_local"
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode=mode):
            self.result = self.step(self.inputs, self.labels)
        self.graph = graph
