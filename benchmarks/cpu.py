"""Whole steps on a CPU: other libraries' tutorials, in spikefuse and in their own library.

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
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import runner
from benchmarks.layers import OURS, spikingjelly
from benchmarks.runner import Contender, Record, Timing, first_line, measure

FUSED, LAST = f"{OURS}, fused", ", channels-last"
JELLY, SNNTORCH = "SpikingJelly", "snnTorch"
BATCH = 128
# Allowed relative difference of the first losses, since a few spikes differ by rounding.
TOLERANCE = 0.01

Loss = Callable[[Tensor, Tensor], Tensor]
Make = Callable[..., torch.optim.Optimizer]


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("cpu", __doc__)
    parser.set_defaults(device="cpu")
    args = runner.parse(parser, argv)
    if args.device != "cpu":
        parser.error("these are benchmarks of a CPU")
    return runner.run_cases(args, (
        ("SpikingJelly's CSNN, T = 4", partial(csnn_case, args)),
        ("snnTorch's tutorial 5, T = 25", partial(tutorial_case, args, conv=False)),
        ("snnTorch's tutorial 6, T = 50", partial(tutorial_case, args, conv=True)),
        ("one step, 784-1000-10", partial(one_step_case, args)),
    ))  # fmt: skip


def training_step(
    net: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, loss: Loss, optimizer: Any
) -> Callable[[], float]:
    """Return a training step, which returns the loss."""

    def step() -> float:
        optimizer.zero_grad()
        found = loss(net(x), y)
        found.backward()
        optimizer.step()
        return float(found.detach())

    return step


def compare(args: argparse.Namespace, contenders: list[Contender]) -> Record:
    """Time contenders that return a loss; the first one is ours."""
    expected: list[float] = []

    def verify(contender: Contender, loss: float) -> None:
        expected.append(loss)
        error = abs(loss - expected[0])
        assert error <= TOLERANCE * abs(expected[0]), f"loss {loss:.6g}, not {expected[0]:.6g}"

    return measure(contenders, verify, Timing.of(args, whole_steps=True))


def ours(
    net: nn.Module,
    batch: tuple[Tensor, Tensor],
    T: int,
    loss: Loss,
    optimizer: Make,
    ways: tuple[bool, ...] = (False, True),
) -> list[Contender]:
    """The network unfused and, if it has a batch norm, fused, in the memory formats `ways`."""
    found, (x, y) = [], batch
    has_norm = any(isinstance(m, nn.BatchNorm2d) for m in net.modules())
    for last, fused in itertools.product(ways, (False, True) if has_norm else (False,)):
        made: nn.Module = sf.Temporal(copy.deepcopy(net)).train()
        made, given = sf.fuse(made) if fused else made, x
        if last:
            made.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            given = x.contiguous(memory_format=torch.channels_last)

        def run(images: Tensor, made: nn.Module = made) -> Tensor:
            return made(sf.nn.encode.direct(images, T))

        step = training_step(run, given, y, loss, optimizer(made.parameters()))
        found.append(Contender((FUSED if fused else OURS) + LAST * last, step))
    return found


def rival(name: str, make: Callable[[], Callable[[], float]]) -> Contender:
    try:
        return Contender(name, make())
    except Exception as error:  # it, or what it needs, is not installed
        return Contender(name, unavailable=first_line(error))


# Tutorials


def csnn(ifs: Callable[[], nn.Module], channels: int = 32) -> list[nn.Module]:
    """The layers of SpikingJelly's `examples/conv_fashion_mnist.py`."""
    size = channels * 7 * 7
    return [
        *(nn.Conv2d(1, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), ifs()),
        *(nn.MaxPool2d(2, 2), nn.Conv2d(channels, channels, 3, padding=1, bias=False)),
        *(nn.BatchNorm2d(channels), ifs(), nn.MaxPool2d(2, 2), nn.Flatten()),
        *(nn.Linear(size, channels * 16, bias=False), ifs()),
        *(nn.Linear(channels * 16, 10, bias=False), ifs()),
    ]


def rate_loss(spikes: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(spikes.mean(0), F.one_hot(y, 10).float())


def if_neuron() -> sf.IF:
    return sf.IF(surrogate=sf.surrogate.Arctan(2.0))


def jelly_step(
    net: nn.Sequential, x: Tensor, y: Tensor, T: int, optimizer: Make
) -> Callable[[], float]:
    functional, neuron, layer, surrogate = spikingjelly(
        "functional", "neuron", "layer", "surrogate"
    )

    def multi_step(module: nn.Module) -> nn.Module:
        if isinstance(module, sf.IF):
            return neuron.IFNode(surrogate_function=surrogate.ATan())
        return layer.SeqToANNContainer(copy.deepcopy(module))

    made = nn.Sequential(*map(multi_step, net))
    functional.set_step_mode(made, "m")

    def run(images: Tensor) -> Tensor:
        functional.reset_net(made)
        return made(images.unsqueeze(0).expand(T, -1, -1, -1, -1))

    return training_step(run, x, y, rate_loss, optimizer(made.parameters()))


def csnn_case(args: argparse.Namespace) -> Record:
    x, y = images(args)
    T, net = 4, nn.Sequential(*csnn(if_neuron))
    sgd = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
    found = ours(net, (x, y), T, rate_loss, sgd)
    return compare(args, [*found, rival(JELLY, lambda: jelly_step(net, x, y, T, sgd))])


class Dense(nn.Module):
    """snnTorch's tutorial 5, whose loss reads the membranes of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(784, 1000), nn.Linear(1000, 10)
        self.lif1, self.lif2 = (leaky(0.95, sf.surrogate.Arctan(2.0)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.lif2(self.fc2(self.lif1(self.fc1(x))), outputs=("v",))[0]


def leaky(beta: float, surrogate: sf.surrogate.Surrogate) -> sf.DelayedResetLIF:
    return sf.DelayedResetLIF(beta, surrogate=surrogate)


def steps_loss(values: Tensor, y: Tensor) -> Tensor:
    """The sum over time of the cross entropies."""
    T, batch = values.shape[:2]
    return F.cross_entropy(values.flatten(0, 1), y.repeat(T), reduction="sum") / batch


def mean_loss(values: Tensor, y: Tensor) -> Tensor:
    return steps_loss(values, y) / len(values)


def torch_step(
    net: nn.Module, x: Tensor, y: Tensor, T: int, optimizer: Make, conv: bool
) -> Callable[[], float]:
    """The loops of snnTorch's tutorials 5 and 6, whose networks are called once for each step."""
    snn = importlib.import_module("snntorch")
    functional = importlib.import_module("snntorch.functional")
    surrogate = importlib.import_module("snntorch.surrogate")
    net = copy.deepcopy(net)
    if conv:
        slope = surrogate.fast_sigmoid(slope=25)
        kinds: list[nn.Module] = [
            snn.Leaky(beta=0.5, spike_grad=slope, init_hidden=True, output=i == 2) for i in range(3)
        ]
        given = iter(kinds)
        layers = [next(given) if isinstance(m, sf.Neuron) else m for m in net.children()]
        made = nn.Sequential(*layers)
        utils, rate = importlib.import_module("snntorch.utils"), functional.ce_rate_loss()

        def run(images: Tensor) -> Tensor:
            utils.reset(made)
            return torch.stack([made(images)[0] for _ in range(T)])

        return training_step(run, x, y, lambda s, y: rate(s, y), optimizer(made.parameters()))
    fc1, fc2 = (net.get_submodule(name) for name in ("fc1", "fc2"))
    lif1, lif2 = snn.Leaky(beta=0.95), snn.Leaky(beta=0.95)

    def membranes(x: Tensor) -> Tensor:
        mem1, mem2, found = lif1.init_leaky(), lif2.init_leaky(), []
        for _ in range(T):
            spikes, mem1 = lif1(fc1(x), mem1)
            _, mem2 = lif2(fc2(spikes), mem2)
            found.append(mem2)
        return torch.stack(found)

    def loss(found: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros(1)
        for mem in found:
            total = total + F.cross_entropy(mem, y)
        return total

    return training_step(membranes, x, y, loss, optimizer(net.parameters()))


def tutorial_case(args: argparse.Namespace, conv: bool) -> Record:
    x, y = images(args)
    T = 2 if args.quick else (50 if conv else 25)
    adam = partial(torch.optim.Adam, lr=1e-4)
    if conv:
        lif = partial(leaky, 0.5, sf.surrogate.FastSigmoid(25.0))
        net: nn.Module = nn.Sequential(
            *(nn.Conv2d(1, 12, 5), nn.MaxPool2d(2), lif(), nn.Conv2d(12, 64, 5), nn.MaxPool2d(2)),
            *(lif(), nn.Flatten(), nn.Linear(64 * 4 * 4, 10), lif()),
        )
    else:
        x, net = x.flatten(1), Dense()
    loss, ways = (mean_loss, (False, True)) if conv else (steps_loss, (False,))
    found = ours(net, (x, y), T, loss, adam, ways)
    return compare(args, [*found, rival(SNNTORCH, lambda: torch_step(net, x, y, T, adam, conv))])


def images(args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    batch = 4 if args.quick else BATCH
    return torch.rand(batch, 1, 28, 28), torch.randint(10, (batch,))


def one_step_case(args: argparse.Namespace) -> Record:
    torch.manual_seed(0)
    x, fc1, fc2 = torch.rand(1, 784), nn.Linear(784, 1000), nn.Linear(1000, 10)
    lif = partial(leaky, 0.95, sf.surrogate.Arctan(2.0))
    net = sf.Temporal(nn.Sequential(fc1, lif(), fc2, lif()))
    stream = sf.nn.Stream(net)

    def stepped() -> float:
        with torch.no_grad():
            return float(net(x[None]).sum())

    def streamed() -> float:
        stream.reset()
        return float(stream(x).sum())

    def theirs() -> Callable[[], float]:
        snn = importlib.import_module("snntorch")
        lif1, lif2 = snn.Leaky(beta=0.95), snn.Leaky(beta=0.95)

        def run() -> float:
            with torch.no_grad():
                spikes, _ = lif1(fc1(x), lif1.init_leaky())
                return float(lif2(fc2(spikes), lif2.init_leaky())[0].sum())

        return run

    found = [Contender(OURS, stepped), Contender(f"{OURS}, stream", streamed)]
    return compare(args, [*found, rival(SNNTORCH, theirs)])


if __name__ == "__main__":
    main()
