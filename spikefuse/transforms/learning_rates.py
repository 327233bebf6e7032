"""Learning rates that a recorded step reads from the GPU."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from spikefuse._torch import version
from spikefuse.graph import capture

#: Settings of a group of parameters that recorded steps do not depend on where they read the rate
#: from the GPU: a step makes its optimizers capturable.
OURS = "lr", "initial_lr", "capturable"


class LearningRates:
    """The learning rates of optimizers: tensors while a step runs or is recorded, so that a replay
    reads their current values, and the user's numbers at other times."""

    def __init__(self) -> None:
        self.optimizers: list[Optimizer] = []
        # By the positions of optimizer and group; the values are those in the tensors.
        self.tensors: dict[tuple[int, int], Tensor] = {}
        self.values: dict[tuple[int, int], float] = {}

    def groups(self) -> Iterator[tuple[tuple[int, int], dict[str, Any], bool]]:
        """Yield all groups of parameters, and whether a graph can read their rate."""
        for i, optimizer in enumerate(self.optimizers):
            for j, group in enumerate(optimizer.param_groups):
                on_gpu = bool(group["params"]) and capture.is_cuda(group["params"][0])
                is_tensor = isinstance(group["lr"], Tensor) and group["lr"].is_cuda  # the user's
                takes_tensors = bool(group.get("fused") or "capturable" in group)
                yield (i, j), group, on_gpu and takes_tensors and not is_tensor

    def update(self) -> None:
        """Make optimizers capturable, and copy rates that have changed to the GPU."""
        for at, group, is_read in self.groups():
            if is_read and not group.get("capturable", True):
                group["capturable"] = True
                for state in map(self.optimizers[at[0]].state.get, group["params"]):
                    if state and isinstance(state.get("step"), Tensor):
                        device = group["params"][0].device
                        state["step"] = state["step"].to(device, torch.float32)
            if is_read and self.values.get(at) != (value := float(group["lr"])):
                tensor = torch.empty((), dtype=torch.float32, device=group["params"][0].device)
                self.tensors.setdefault(at, tensor).fill_(value)
                self.values[at] = value

    @contextlib.contextmanager
    def as_tensors(self) -> Iterator[list[str]]:
        """Let optimizers read the tensors; yield a list to which problems are added at the end."""
        self.update()
        problems: list[str] = []
        replaced = []
        for at, group, is_read in self.groups():
            if is_read:
                replaced.append((at, group, group["lr"], version(self.tensors[at])))
                group["lr"] = self.tensors[at]
        try:
            with warnings.catch_warnings():  # of eager steps, which come before the recording
                warnings.filterwarnings("ignore", "This instance was constructed with capturable")
                yield problems
        finally:
            for at, group, rate, before in replaced:
                if group["lr"] is not self.tensors[at] or version(group["lr"]) != before:
                    problems += ["it changes a learning rate: call scheduler.step() after the step"]
                    rate = float(group["lr"])
                    del self.values[at]
                group["lr"] = rate

    def settings(self) -> Any:
        """Return all else that the recorded steps of the optimizers depend on."""
        return tuple(
            (name, _constant(value))
            for _, group, is_read in self.groups()
            for name, value in group.items()
            if name != "params" and not (is_read and name in OURS)
        )


def _constant(x: Any) -> Any:
    if isinstance(x, Tensor):
        # A graph reads a tensor on the GPU, and has recorded the value of another.
        return x.data_ptr() if x.is_cuda else repr(x.tolist())
    return repr(x)
