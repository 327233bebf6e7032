"""Learning rates that a recorded step reads from the GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class LearningRates:
    """The learning rates of an optimizer: tensors while its step is recorded, so that a replay
    reads their current values, and the user's numbers at other times."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.tensors: dict[int, Tensor] = {}  # by the position of the group
        self.rates: dict[int, float | Tensor] = {}  # the user's
        self.values: dict[int, float] = {}
        self.versions: dict[int, int] = {}

    def install(self) -> None:
        for i, group in enumerate(self.optimizer.param_groups):
            rate = group["lr"]
            if (isinstance(rate, Tensor) and rate.is_cuda) or not _takes_tensors(group):
                continue
            if not group.get("capturable", True):
                self._make_capturable(group)
            if i not in self.tensors:
                device = group["params"][0].device
                self.tensors[i] = torch.empty((), dtype=torch.float32, device=device)
            self.values.pop(i, None)
        self.update()
        for i, tensor in self.tensors.items():
            self.optimizer.param_groups[i]["lr"] = tensor
            self.versions[i] = tensor._version

    def update(self) -> None:
        """Copy rates that have changed to the GPU."""
        for i, tensor in self.tensors.items():
            self.rates[i] = self.optimizer.param_groups[i]["lr"]
            value = float(self.rates[i])
            if self.values.get(i) != value:
                tensor.fill_(value)
                self.values[i] = value

    def restore(self) -> bool:
        """Return to numbers; whether the step has changed a rate."""
        changed = False
        for i, tensor in self.tensors.items():
            group, rate = self.optimizer.param_groups[i], self.rates[i]
            if group["lr"] is not tensor or tensor._version != self.versions[i]:
                rate, changed = float(group["lr"]), True
            group["lr"] = rate
        return changed

    def settings(self) -> Any:
        """All else that the recorded step of the optimizer depends on."""
        settings = []
        for i, group in enumerate(self.optimizer.param_groups):
            left_out = _RATES if i in self.tensors else ("params",)
            values = [_constant(value) for name, value in group.items() if name not in left_out]
            settings.append((len(group["params"]), *values))
        return tuple(settings)

    def _make_capturable(self, group: dict[str, Any]) -> None:
        group["capturable"] = True
        self.optimizer._warned_capturable_if_run_uncaptured = True
        for p in group["params"]:
            state = self.optimizer.state.get(p, {})
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].to(p.device, torch.float32)


_RATES = ("params", "lr", "initial_lr")


def _takes_tensors(group: dict[str, Any]) -> bool:
    """Whether an optimizer takes the learning rate of this group as a tensor on the GPU."""
    is_cuda = bool(group["params"]) and group["params"][0].is_cuda
    return is_cuda and bool(group.get("fused") or "capturable" in group)


def _constant(value: Any) -> Any:
    if isinstance(value, Tensor):
        # A graph reads a tensor on the GPU, and has recorded the value of another.
        return value.data_ptr() if value.is_cuda else _constant(value.tolist())
    return tuple(map(_constant, value)) if isinstance(value, list | tuple) else value
