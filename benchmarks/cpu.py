"""Steps on a CPU: other libraries' tutorials here and in their own library, and fused blocks.

    PYTHONPATH=.parity python -m benchmarks.cpu

The tutorials are SpikingJelly's CSNN on Fashion-MNIST (32 channels, T = 4, multi-step mode, SGD)
and snnTorch's tutorials 5 (784-1000-10, 25 steps) and 6 (convolutions, 50 steps), each in its own
library as the tutorial has it, and in spikefuse, with a batch of 128 random images. Where it says
channels-last, weights and images have that memory format. "One step" is one sample through one time
step without gradients.

All contenders of a row begin with the same weights, and their first losses must agree.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import runner
from benchmarks.jelly import spikingjelly
from benchmarks.layers import OURS
from benchmarks.runner import Contender, Record, Timing, first_line, measure

FUSED, LAST = f"{OURS}, fused", ", channels-last"
JELLY, SNNTORCH = "SpikingJelly", "snnTorch"
BATCH = 128
WAYS = tuple(itertools.product((False, True), repeat=2))  # fused, channels-last
# Allowed relative difference of the first losses, since a few spikes differ by rounding.
TOLERANCE = 0.01


@dataclass
class Tutorial:
    """A tutorial's network of our neurons for one time step, and how it is trained."""

    net: nn.Module
    T: int
    loss: Callable[[Tensor, Tensor], Tensor]  # of outputs over time, and labels
    optimizer: Callable[..., torch.optim.Optimizer]
    images: Tensor
    labels: Tensor

    def step(
        self, parameters: Any, run: Callable[[Tensor], Tensor], images: Tensor
    ) -> Callable[[], float]:
        """Return a training step of the network that `run` calls, which returns the loss."""
        optimizer = self.optimizer(parameters)

        def step() -> float:
            optimizer.zero_grad()
            found = self.loss(run(images), self.labels)
            found.backward()
            optimizer.step()
            return float(found.detach())

        return step

    def ours(self, fused: bool, last: bool) -> Contender:
        """Run a copy, fused or in channels-last or both."""
        net: nn.Module = sf.Temporal(copy.deepcopy(self.net)).train()
        net = sf.fuse(net) if fused else net
        images = self.images
        if last:
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            images = images.contiguous(memory_format=torch.channels_last)

        def run(x: Tensor) -> Tensor:
            return net(sf.nn.encode.direct(x, self.T))

        name = (FUSED if fused else OURS) + LAST * last
        return Contender(name, self.step(net.parameters(), run, images))


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("cpu", __doc__)
    parser.set_defaults(device="cpu")
    args = runner.parse(parser, argv)
    if args.device != "cpu":
        parser.error("these are benchmarks of a CPU")
    blocks = (
        (f"norm and IF, T = {T}, {part}", partial(block, args, T, part == "training"))
        for T in (1, 4, 8, 32)
        for part in ("training", "evaluation")
    )
    return runner.run_cases(args, (
        ("SpikingJelly's CSNN, T = 4", partial(csnn, args)),
        ("snnTorch's tutorial 5, T = 25", partial(tutorial_5, args)),
        ("snnTorch's tutorial 6, T = 50", partial(tutorial_6, args)),
        ("one step, 784-1000-10", partial(one_step, args)),
        *blocks,
    ))  # fmt: skip


def rival(name: str, make: Callable[[], Any]) -> Contender:
    """Return the contender of another library."""
    try:
        return Contender(name, make())
    except Exception as error:  # it, or what it needs, is not installed
        return Contender(name, unavailable=first_line(error))


def compare(args: argparse.Namespace, *contenders: Contender) -> Record:
    """Time contenders that return a loss."""
    expected: list[float] = []

    def verify(contender: Contender, loss: float) -> None:
        expected.append(loss)
        error = abs(loss - expected[0])
        assert error <= TOLERANCE * abs(expected[0]), f"loss {loss:.6g}, not {expected[0]:.6g}"

    return measure(contenders, verify, Timing.of(args, whole_steps=True))


def random_batch(args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    batch = 4 if args.quick else BATCH
    return torch.rand(batch, 1, 28, 28), torch.randint(10, (batch,))


def mean_loss(values: Tensor, labels: Tensor) -> Tensor:
    """The mean over time of the cross entropies."""
    return F.cross_entropy(values.flatten(0, 1), labels.repeat(len(values)))


# SpikingJelly


def csnn(args: argparse.Namespace, channels: int = 32) -> Record:
    """The network of SpikingJelly's `examples/conv_fashion_mnist.py`."""
    images, labels = random_batch(args)
    spike = partial(sf.IF, surrogate=sf.surrogate.Arctan(2.0))
    net = nn.Sequential(
        *(nn.Conv2d(1, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), spike()),
        *(nn.MaxPool2d(2, 2), nn.Conv2d(channels, channels, 3, padding=1, bias=False)),
        *(nn.BatchNorm2d(channels), spike(), nn.MaxPool2d(2, 2), nn.Flatten()),
        *(nn.Linear(channels * 49, channels * 16, bias=False), spike()),
        *(nn.Linear(channels * 16, 10, bias=False), spike()),
    )

    def rate_loss(spikes: Tensor, labels: Tensor) -> Tensor:
        return F.mse_loss(spikes.mean(0), F.one_hot(labels, 10).float())

    sgd = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
    tutorial = Tutorial(net, 4, rate_loss, sgd, images, labels)

    def theirs() -> Callable[[], float]:
        functional, neuron, layer, surrogate = spikingjelly(
            "functional", "neuron", "layer", "surrogate"
        )
        made = nn.Sequential(*(
            neuron.IFNode(surrogate_function=surrogate.ATan())
            if isinstance(module, sf.IF) else layer.SeqToANNContainer(copy.deepcopy(module))
            for module in net
        ))  # fmt: skip
        functional.set_step_mode(made, "m")

        def run(x: Tensor) -> Tensor:
            functional.reset_net(made)
            return made(x.unsqueeze(0).expand(tutorial.T, -1, -1, -1, -1))

        return tutorial.step(made.parameters(), run, images)

    ours = (tutorial.ours(fused, last) for fused, last in WAYS)
    return compare(args, *ours, rival(JELLY, theirs))


# snnTorch


def adam_tutorial(
    args: argparse.Namespace, net: nn.Module, T: int, loss: Callable[[Tensor, Tensor], Tensor]
) -> Tutorial:
    adam = partial(torch.optim.Adam, lr=1e-4)
    return Tutorial(net, 2 if args.quick else T, loss, adam, *random_batch(args))


class Dense(nn.Module):
    """snnTorch's tutorial 5, whose loss reads the membranes of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(784, 1000), nn.Linear(1000, 10)
        self.lif1, self.lif2 = (
            sf.DelayedResetLIF(0.95, surrogate=sf.surrogate.Arctan(2.0)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.lif2(self.fc2(self.lif1(self.fc1(x))), outputs=("v",))[0]


def tutorial_5(args: argparse.Namespace) -> Record:
    def loss(membranes: Tensor, labels: Tensor) -> Tensor:
        return mean_loss(membranes, labels) * len(membranes)

    net = Dense()
    tutorial = adam_tutorial(args, net, 25, loss)
    tutorial.images = tutorial.images.flatten(1)

    def theirs() -> Callable[[], float]:
        snn, made = importlib.import_module("snntorch"), copy.deepcopy(net)
        lif1, lif2 = snn.Leaky(beta=0.95), snn.Leaky(beta=0.95)

        def membranes(x: Tensor) -> Tensor:
            mem1, mem2, found = lif1.init_leaky(), lif2.init_leaky(), []
            for _ in range(tutorial.T):
                spikes, mem1 = lif1(made.fc1(x), mem1)
                _, mem2 = lif2(made.fc2(spikes), mem2)
                found.append(mem2)
            return torch.stack(found)

        return tutorial.step(made.parameters(), membranes, tutorial.images)

    return compare(args, tutorial.ours(fused=False, last=False), rival(SNNTORCH, theirs))


def tutorial_6(args: argparse.Namespace) -> Record:
    lif = partial(sf.DelayedResetLIF, 0.5, surrogate=sf.surrogate.FastSigmoid(25.0))
    net = nn.Sequential(
        *(nn.Conv2d(1, 12, 5), nn.MaxPool2d(2), lif(), nn.Conv2d(12, 64, 5), nn.MaxPool2d(2)),
        *(lif(), nn.Flatten(), nn.Linear(64 * 4 * 4, 10), lif()),
    )
    tutorial = adam_tutorial(args, net, 50, mean_loss)

    def theirs() -> Callable[[], float]:
        snn, utils = (importlib.import_module(f"snntorch{name}") for name in ("", ".utils"))
        slope = importlib.import_module("snntorch.surrogate").fast_sigmoid(slope=25)
        leaky = partial(snn.Leaky, beta=0.5, spike_grad=slope, init_hidden=True)
        layers = [leaky() if isinstance(m, sf.Neuron) else m for m in copy.deepcopy(net)]
        made = nn.Sequential(*layers[:-1], leaky(output=True))

        def run(x: Tensor) -> Tensor:
            utils.reset(made)
            return torch.stack([made(x)[0] for _ in range(tutorial.T)])

        return tutorial.step(made.parameters(), run, tutorial.images)

    ours = (tutorial.ours(fused, last) for fused, last in WAYS)
    return compare(args, *ours, rival(SNNTORCH, theirs))


def one_step(args: argparse.Namespace) -> Record:
    torch.manual_seed(0)
    x, fc1, fc2 = torch.rand(1, 784), nn.Linear(784, 1000), nn.Linear(1000, 10)
    lif = partial(sf.DelayedResetLIF, 0.95, surrogate=sf.surrogate.Arctan(2.0))
    net = sf.Temporal(nn.Sequential(fc1, lif(), fc2, lif()))
    stream = sf.nn.Stream(net)

    @torch.no_grad()
    def stepped() -> float:
        return float(net(x[None]).sum())

    def streamed() -> float:
        stream.reset()
        return float(stream(x).sum())

    def theirs() -> Callable[[], float]:
        snn = importlib.import_module("snntorch")
        lif1, lif2 = snn.Leaky(beta=0.95), snn.Leaky(beta=0.95)

        @torch.no_grad()
        def run() -> float:
            spikes, _ = lif1(fc1(x), lif1.init_leaky())
            return float(lif2(fc2(spikes), lif2.init_leaky())[0].sum())

        return run

    ours = (Contender(OURS, stepped), Contender(f"{OURS}, stream", streamed))
    return compare(args, *ours, rival(SNNTORCH, theirs))


# Fused against unfused


def block(args: argparse.Namespace, T: int, training: bool) -> Record:
    torch.manual_seed(0)
    x = torch.randn(T, 4 if args.quick else BATCH, 32, 14, 14, requires_grad=training)
    grad = torch.randn_like(x)

    def step(net: nn.Module) -> float:
        with torch.set_grad_enabled(training):
            y = net(x)
        if training:
            torch.autograd.grad(y, (x, *net.parameters()), grad)
        return float(y.detach()[-1].sum())

    def made() -> nn.Module:
        return sf.Temporal(nn.Sequential(nn.BatchNorm2d(32), sf.IF())).train(training)

    ours = {OURS: made(), FUSED: sf.fuse(made())}
    return compare(args, *(Contender(name, partial(step, net)) for name, net in ours.items()))


if __name__ == "__main__":
    main()
