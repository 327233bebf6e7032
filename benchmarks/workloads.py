"""Whole networks to be measured: their neurons, weights and batches.

Shape legend: T time steps, B samples, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import spikefuse as sf
from benchmarks import lif
from benchmarks.layer import DTYPES
from spikefuse.models import MODELS

SURROGATES: dict[str, Callable[[], sf.surrogate.Surrogate]] = {
    "sigmoid": lambda: sf.surrogate.Sigmoid(lif.WIDTH),
    "rectangle": sf.surrogate.Rectangle,
}


@dataclass(frozen=True)
class Workload:
    """One of `spikefuse.models`, its neurons, and what it is trained on; `shape` is C, H, W.

    The neurons are those of "Towards Scalable GPU-Accelerated SNN Training via Temporal Fusion",
    unless others are named.
    """

    model: str
    shape: tuple[int, int, int]
    num_classes: int = 10
    T: int = 32
    batch: int = 100
    decay: float = lif.DECAY
    threshold: float = lif.THRESHOLD
    surrogate: str = "sigmoid"
    optimizer: str = "adam"
    norms: bool = True

    def neuron(self, threshold: float = 1.0) -> sf.LIF:
        """A new one; `threshold` is a factor of its own."""
        surrogate = SURROGATES[self.surrogate]()
        return sf.LIF(self.decay, self.threshold * threshold, surrogate=surrogate)

    def network(self, activation: Callable[[], nn.Module]) -> nn.Module:
        """For one time step, `[B, C, H, W]` to `[B, K]`."""
        size = (self.shape[0], self.num_classes, self.shape[1:])
        more = {} if self.norms else {"norm": False}  # the plain stacks alone know it
        return MODELS[self.model](activation, *size, **more)

    def small(self) -> Workload:
        """The same for trials."""
        # Not smaller: of a convolution with stride 2 on one pixel, oneDNN leaves a part of the
        # bfloat16 weight gradient unwritten.
        return replace(self, shape=(self.shape[0], 32, 32), T=2, batch=2)


# The neurons of "Accelerating Spatiotemporal Supervised Training of Large-Scale Spiking Neural
# Networks on GPU".
_BPTT: dict[str, Any] = {"decay": 0.25, "threshold": 0.25, "surrogate": "rectangle"}
MNIST, CIFAR, IMAGENET = (1, 28, 28), (3, 32, 32), (3, 224, 224)
RESNETS = {
    f"resnet{depth}-{name}": Workload(f"resnet{depth}", shape)
    for name, shape in (("mnist", MNIST), ("cifar10", CIFAR))
    for depth in (18, 34, 50)
}
WORKLOADS: dict[str, Workload] = {
    **RESNETS,
    "resnet18-mnist-sgd": Workload("resnet18", MNIST, optimizer="sgd"),
    **{
        f"{size}-cifar10": Workload(f"cifar_{size}", CIFAR, T=10, batch=64, **_BPTT)
        for size in ("small", "medium", "large")
    },
    "resnet18-gesture": Workload("resnet18", (2, 128, 128), num_classes=11, batch=10),
    "alexnet-imagenet": Workload("alexnet", IMAGENET, 1000, T=6, batch=16, **_BPTT),
    "resnet34-imagenet": Workload("ms_resnet34", IMAGENET, 1000, T=6, batch=16, **_BPTT),
}


class Task:
    """A workload in one precision on one device: the weights and the batch that all share.

    Weights are channels-last. The input is drawn as by Poisson encoding of random images; running
    statistics are those of the batch.
    """

    def __init__(self, workload: Workload, dtype: str, device: torch.device, seed: int = 0) -> None:
        self.workload, self.dtype, self.device = workload, dtype, device
        generator = torch.Generator(device).manual_seed(seed)
        size = (workload.T, workload.batch, *workload.shape)
        drawn = torch.rand(size, generator=generator, device=device)
        rates = torch.rand(size[1:], generator=generator, device=device)
        steps = (drawn < rates).float().flatten(0, 1)
        self.x = steps.contiguous(memory_format=torch.channels_last).unflatten(0, size[:2])
        self.labels = torch.randint(
            workload.num_classes, (workload.batch,), generator=generator, device=device
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same weights in every process
            net = workload.network(workload.neuron)
        net.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        norms = [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        for norm in norms:
            norm.momentum = 1.0
        with torch.no_grad(), self.autocast():
            sf.Temporal(net)(self.x)
        self.state = {name: value.clone() for name, value in net.state_dict().items()}

    def autocast(self) -> torch.autocast:
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=DTYPES[self.dtype] is torch.bfloat16
        )

    def network(self, activation: Callable[[], nn.Module], norms: bool = True) -> nn.Module:
        """The workload's network with the shared weights and other activations."""
        with torch.device("meta"):
            net = self.workload.network(activation)
        if not norms:
            without_norms(net)
        state = {name: self.state[name].clone() for name in net.state_dict()}
        net.load_state_dict(state, assign=True)
        return net

    def restore(self, net: nn.Module) -> None:
        """Give a network the shared weights again, in place."""
        with torch.no_grad():
            for name, value in net.state_dict().items():
                value.copy_(self.state[name])


def without_norms(net: nn.Module) -> None:
    for module in list(net.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                setattr(module, name, nn.Identity())
