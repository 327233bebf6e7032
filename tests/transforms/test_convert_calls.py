"""Converted neurons run once in a call of their network, whatever the code of `forward` is."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf
from tests.transforms.clock_driven import LIFNode, MultiStepLIFNode

MESSAGE = r"'{}' \(spikingjelly\.LIFNode\) is called a second time in one call of the network\. "


class Blocks(nn.Module):
    """A neuron for each call."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), LIFNode(v_threshold=0.1)) for _ in range(2)
        )

    def step(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x)


class LoopAroundBlocks(Blocks):
    def forward(self, x):
        total = 0
        for _ in range(4):
            y = x
            for block in self.blocks:
                y = block(y)
            total = total + y
        return total


class GeneratorOfSteps(Blocks):
    def forward(self, x):
        return sum(self.step(x) for _ in range(4))


class Alias(Blocks):
    def forward(self, x):
        block = self.blocks[0]
        return block(block(x))


class Indices(Blocks):
    def forward(self, x):
        for i in (0, 1, 0):
            x = self.blocks[i](x)
        return x


class Enumerated(Blocks):
    def forward(self, x):
        for _ in range(2):
            for _, block in enumerate(self.blocks):
                x = block(x)
        return x


class Zipped(Blocks):
    def forward(self, x):
        for first, second in zip(self.blocks, self.blocks, strict=True):
            x = second(first(x))
        return x


class TwoPasses(Blocks):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        for block in self.blocks:
            x = block(x)
        return x


class Mapped(Blocks):
    def forward(self, x):
        return sum(map(self.step, [x] * 4))


class InnerFunction(Blocks):
    def forward(self, x):
        def run(y):
            return self.blocks[0](y)

        return run(run(x))


class Recursive(Blocks):
    def forward(self, x, depth=2):
        return self.forward(self.step(x), depth - 1) if depth else x


class ByName(Blocks):
    def forward(self, x):
        for name in ("0", "0"):
            x = getattr(self.blocks, name)(x)
        return x


class Children(Blocks):
    def forward(self, x):
        for _ in range(2):
            for block in self.blocks.children():
                x = block(x)
        return x


class ForwardMethod(Blocks):
    def forward(self, x):
        neuron = self.blocks[0][1]
        return neuron.forward(neuron.forward(x))


REPEATED = (
    *(LoopAroundBlocks, GeneratorOfSteps, Alias, Indices, Enumerated, Zipped, TwoPasses, Mapped),
    *(InnerFunction, Recursive, ByName, Children, ForwardMethod),
)


def sequence() -> Tensor:
    torch.manual_seed(0)
    return 2 * torch.randn(5, 3, 6)


@pytest.mark.parametrize("kind", REPEATED)
def test_a_second_call_is_refused(kind):
    net, x = sf.Temporal(sf.convert(kind())), sequence()
    for _ in range(2):
        with pytest.raises(ValueError, match=MESSAGE.format(r"blocks\.0\.1")):
            net(x)


@pytest.mark.parametrize(
    "run",
    [
        lambda net, x: sf.fuse(sf.Temporal(net))(x),
        lambda net, x: torch.compile(sf.Temporal(net), backend="eager")(x),
        lambda net, x: sf.Temporal(net, memory=sf.memory.Checkpoint())(x),
        lambda net, x: sf.Temporal(net)(x, return_state=True),
        lambda net, x: sf.Stream(sf.Temporal(net))(x[0]),
        lambda net, x: sf.Loop(Fed(net), (6,))(x),
        lambda net, x: copy.deepcopy(sf.Temporal(net))(x),
        lambda net, x: pickle.loads(pickle.dumps(sf.Temporal(net)))(x),
    ],
    ids=["fused", "compiled", "checkpoint", "states", "stream", "loop", "copied", "pickled"],
)
def test_a_second_call_is_refused_however_the_network_runs(run):
    with pytest.raises(ValueError, match=r"its state goes on .* use a module for each call"):
        run(sf.convert(LoopAroundBlocks()), sequence())


class Fed(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.net(x + y)


def test_a_neuron_for_each_call_runs_and_trains():
    model, x = Blocks(), sequence()
    expected = torch.stack([model(step) for step in x])
    net = sf.Temporal(sf.convert(model))
    weights, results = [*net.parameters()], []
    for other in (
        net,
        net,
        sf.fuse(net),
        sf.Temporal(net.net, memory=sf.memory.Checkpoint()),
        sf.fuse(sf.Temporal(net.net, memory=sf.memory.Checkpoint(2))),
    ):
        for _ in range(2):
            y = other(x)
            assert torch.equal(y, expected)
            results.append(torch.autograd.grad(y.square().sum(), weights))
    assert results[0][0].any()
    for gradients in results:
        torch.testing.assert_close(gradients, results[0])
    stream = sf.Stream(net)
    assert torch.equal(torch.stack([stream(step) for step in x]), expected)
    assert sf.Loop(Fed(net.net), (6,))(x).shape == x.shape  # each step calls each neuron once


class Recomputed(Blocks):
    def forward(self, x):
        return sf.checkpoint(self.step, x)


@pytest.mark.parametrize("wrap", [lambda net: net, sf.fuse], ids=["unfused", "fused"])
def test_recomputation_is_no_second_call(wrap):
    net = wrap(sf.Temporal(sf.convert(Recomputed())))
    for _ in range(2):
        net(sequence()).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


class Sequences(nn.Module):
    """Written for sequences, since it unfolds time itself."""

    def __init__(self, neurons: int) -> None:
        super().__init__()
        self.neurons = nn.ModuleList(MultiStepLIFNode(v_threshold=0.1) for _ in range(neurons))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(0, 1).unflatten(0, x.shape[:2])
        for i in range(2):
            x = 2 * self.neurons[i % len(self.neurons)](x)
        return x


@pytest.mark.parametrize("wrap", [lambda net: net, sf.fuse], ids=["unfused", "fused"])
def test_networks_of_sequences(wrap):
    model, x = Sequences(2), sequence()
    expected, net = model(x), wrap(sf.convert(model))
    for _ in range(2):
        assert torch.equal(net(x), expected)
    net = wrap(sf.convert(Sequences(1)))
    for _ in range(2):
        message = r"'neurons\.0' \(spikingjelly\.MultiStepLIFNode\) is called a second time"
        with pytest.raises(ValueError, match=message):
            net(x)
    neuron = net.neurons[0]  # on its own, each call starts from rest, as everywhere
    assert torch.equal(neuron(x), neuron(x))


def test_an_interrupted_network_leaves_others_alone():
    def interrupt(module: nn.Module, args: Any) -> None:
        raise KeyboardInterrupt

    net, x = sf.convert(Sequences(2)), sequence()
    expected, other = net(x), sf.Temporal(sf.convert(nn.Sequential(LIFNode())))
    handle = net.neurons[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        net(x)
    for _ in range(2):
        other(x)
    handle.remove()
    assert torch.equal(net(x), expected)


def test_replacements_by_extra_run_once():
    class Other(LIFNode):
        pass

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.neurons = nn.ModuleList([Other()])

        def forward(self, x):
            for i in (0, 0):
                x = self.neurons[i](x)
            return x

    net = sf.convert(Twice(), extra={Other: lambda module: sf.LIF()})
    with pytest.raises(ValueError, match=r"'neurons\.0' \(Other\) is called a second time"):
        sf.Temporal(net)(sequence())


def test_networks_of_ours_may_share_a_neuron():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.lif = nn.Linear(6, 6), sf.LIF()

        def forward(self, x):
            return self.lif(self.fc(self.lif(x)))

    net, x = Shared(), sequence()
    assert torch.equal(sf.fuse(sf.Temporal(net))(x), sf.Temporal(net)(x))
    assert sf.Temporal(nn.Sequential(net, sf.convert(Blocks())))(x).shape == x.shape


def test_the_mark_is_no_part_of_the_definition():
    made, plain = sf.convert(LIFNode()), sf.LIF(0.5, decay_input=True)
    assert made.description().basis == sf.convert(LIFNode(tau=2.0)).description().basis
    assert "_converted_from" not in made.constant_names()
    assert repr(made) == repr(copy.deepcopy(made))
    assert "converted" not in repr(made)
    assert made.constant_names() == plain.constant_names()
