"""Training and evaluation steps of whole networks, and what the contenders of a row share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.layers import DTYPES
from benchmarks.runner import difference

# So small that weights, and with them spikes, hardly change while a step is timed.
LEARNING_RATE = 1e-5
# Allowed relative difference of the logits of two steps of a network: rounding flips spikes.
REPEATED = {"float32": 0.1, "bfloat16": 0.3}


class Task:
    """What the contenders of a row share: a batch, a precision, and weights.

    Running statistics equal the statistics of the batch.
    """

    optimizer, layout = "sgd", torch.channels_last

    def __init__(self, x: Tensor, labels: Tensor, dtype: str) -> None:
        self.x, self.labels, self.dtype, self.device = x, labels, dtype, x.device

    def share(self, make: Callable[[], nn.Module], call: Callable[[nn.Module], Any]) -> nn.Module:
        """Make the network whose weights are shared; `call` runs it on the batch."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same weights in every process
            net = make()
        net.to(self.device, memory_format=self.layout)  # type: ignore[call-overload]
        norms = [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.momentum = 1.0
        with torch.no_grad(), self.autocast():
            call(net)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        self.state = {name: value.clone() for name, value in net.state_dict().items()}
        return net

    def autocast(self) -> torch.autocast:
        enabled = DTYPES[self.dtype] is torch.bfloat16
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)

    def restore(self, net: nn.Module) -> None:
        """Copy the shared weights back into a network."""
        with torch.no_grad():
            for name, value in net.state_dict().items():
                value.copy_(self.state[name])


@dataclass
class StepResult:
    """Logits `[B, classes]`; in training also the loss and the gradients."""

    logits: Tensor
    loss: Tensor | None = None
    grads: tuple[Tensor, ...] = ()

    def tensors(self) -> list[Tensor]:
        return [self.logits, *self.grads]


# A step takes input and labels, and returns logits and loss.
Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]


@dataclass
class Network:
    """A network to measure: `net` with the weights, and its `call` over all time steps."""

    net: nn.Module
    call: Callable[[Tensor], Tensor]  # the batch to [T, B, classes]
    neuron: type[nn.Module] | None = None  # of its spiking modules, [T*B, ...] to the same
    exact: bool = False  # its spikes equal the reference's bit for bit
    note: str = ""  # printed below tables
    same_gradient: bool = True  # it has the reference's surrogate
    # Makes a network with the same results, where spikes of neurons cannot be replaced.
    equivalent: Callable[[], Network] | None = None
    flips_spikes: bool = False  # it rounds otherwise than the equivalent one in each layer
    container: nn.Module | None = None  # what `call` runs

    @property
    def fusion(self) -> str:
        """What was fused in the steps so far; empty without `spikefuse.fuse`."""
        fusion = getattr(self.container, "fusion", None)
        return "" if fusion is None else fusion.summary

    def step(self, task: Task, kind: str) -> Callable[[], StepResult]:
        """Return a function that runs a step of `kind` on the task's batch."""
        step = STEPS[kind](task, self)
        return lambda: self.result(step(task.x, task.labels))

    def result(self, found: tuple[Tensor, Tensor | None]) -> StepResult:
        """Add the gradients of the parameters to what a step returned."""
        grads = (p.grad for p in self.net.parameters())
        return StepResult(*found, tuple(g for g in grads if g is not None))


def training(task: Task, network: Network) -> Step:
    """Return a training step: forward, loss, backward, optimizer."""
    network.net.train()
    parameters = tuple(network.net.parameters())
    if task.optimizer == "sgd":
        optimizer: Any = torch.optim.SGD(parameters, LEARNING_RATE, momentum=0.9, fused=True)
    else:
        capturable = task.device.type == "cuda"
        optimizer = torch.optim.Adam(parameters, LEARNING_RATE, fused=True, capturable=capturable)

    def step(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        with task.autocast():  # around the whole step, as in the trainer
            logits = network.call(x).mean(0, dtype=torch.float32)
            loss = F.cross_entropy(logits, labels)
            loss.backward()
            optimizer.step()
        return logits.detach(), loss.detach()

    return step


def evaluation(task: Task, network: Network) -> Step:
    """Return an evaluation step: forward without gradients, classes."""
    network.net.eval()

    def step(x: Tensor, labels: Tensor) -> tuple[Tensor, None]:
        with torch.no_grad(), task.autocast():
            logits = network.call(x).mean(0, dtype=torch.float32)
            logits.argmax(1)
        return logits, None

    return step


STEPS = {"training": training, "evaluation": evaluation}


def check_repeated(name: str, logits: Tensor, first: dict[str, Tensor], dtype: str) -> None:
    """Compare the logits of a step with those of the first step of its network.

    Args:
        first: the logits of the first step of each network; a new network is added.

    Raises:
        AssertionError: they differ by more than `REPEATED`, or are not finite.
    """
    assert logits.isfinite().all(), "the logits are not finite"
    error = difference([logits], [first.setdefault(name, logits.clone())])
    assert error <= REPEATED[dtype], f"the logits differ by {error:.3g} of the first step's norm"
