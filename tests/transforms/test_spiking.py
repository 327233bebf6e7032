"""Ordinary networks made spiking: every activation a neuron of its own, all else as it was."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spikefuse as sf
from spikefuse.models import resnet18
from spikefuse.nn.activations import ACTIVATIONS, FUNCTIONS, METHODS


class Block(nn.Module):
    """The basic block of a ResNet as people write it, with one ReLU for both places."""

    def __init__(self, in_channels: int, channels: int, stride: int, functional: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = F.relu if functional else nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = None
        if stride != 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        x += identity
        return self.relu(x)


class ResNet18(nn.Module):
    """A plain ResNet18 without a neuron in sight."""

    def __init__(self, functional: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = F.relu if functional else nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        blocks, width = [], 64
        for channels in (64, 128, 256, 512):
            blocks.append(Block(width, channels, 1 if channels == 64 else 2, functional))
            blocks.append(Block(channels, channels, 1, functional))
            width = channels
        self.layers = nn.Sequential(*blocks)
        self.fc = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.maxpool(self.relu(self.bn1(self.conv1(x)))))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


def neurons(net: nn.Module) -> list[str]:
    return [name for name, m in net.named_modules() if isinstance(m, sf.Neuron)]


def test_a_plain_resnet18_is_the_spiking_one() -> None:
    torch.manual_seed(0)
    model = ResNet18()
    net = sf.spiking(model, neuron=lambda: sf.LIF(threshold=0.5))
    assert len(neurons(net)) == 9  # of which 8 are called twice
    # Its parameters, in their order, make the library's own Spiking-ResNet18 the same network.
    ours = resnet18(lambda: sf.LIF(threshold=0.5), 1, 10, (32, 32))
    for target, (name, _) in zip(ours.parameters(), model.named_parameters(), strict=True):
        with torch.no_grad():
            target.copy_(net.get_parameter(name))
    x = torch.rand(3, 2, 1, 32, 32)
    logits, expected = sf.Temporal(net)(x), sf.Temporal(ours)(x)
    assert torch.equal(logits, expected)
    logits.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())
    # The model is what it was, and its state dict loads.
    assert neurons(model) == []
    assert net.load_state_dict(model.state_dict()) == ([], [])
    assert {*net.state_dict()} == {*model.state_dict()}


class Net(nn.Module):
    """Two layers and what happens between and after them."""

    def __init__(self, function, *more: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.first, self.second, self.more = nn.Linear(6, 6), nn.Linear(6, 6), nn.ModuleList(more)
        self.gate, self.unused = nn.Parameter(torch.zeros(6)), nn.Linear(2, 2)
        self.register_buffer("offset", torch.ones(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Method(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1).relu()


class Function(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


class Nested(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.helper(x)

    def helper(self, x: Tensor) -> Tensor:
        return torch.nn.functional.relu_(x)


class Attribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = torch.relu

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


FUNCTIONAL = {
    Method: r"x.mean\(1\).relu in Method.forward, line \d+",
    Function: r"F.gelu in Function.forward, line \d+",
    Nested: r"torch.nn.functional.relu_ in Nested.helper, line \d+",
    Attribute: r"self.act of Attribute",
}


@pytest.mark.parametrize("kind", FUNCTIONAL)
def test_functional_calls_are_named(kind: type[nn.Module]) -> None:
    """Also where other activations are modules."""
    with pytest.raises(ValueError, match=f"neurons can't replace: {FUNCTIONAL[kind]}. Make each"):
        sf.spiking(nn.Sequential(nn.ReLU(), kind()), sf.LIF)
    net = sf.spiking(nn.Sequential(nn.Tanh(), kind()), sf.LIF, replace=(nn.Tanh,))
    assert neurons(net) == ["0"]


def test_functional_calls_of_a_resnet_are_named() -> None:
    with pytest.raises(ValueError, match=r"self.relu of ResNet18; self.relu of Block"):
        sf.spiking(ResNet18(functional=True), sf.LIF)


def test_contexts_and_branches_stay() -> None:
    """The code of the network runs as it is."""

    def forward(n: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = n.first(x)
        return n.second(n.more[0](y if x.mean() > -1 else x))

    net = sf.spiking(Net(forward, nn.ReLU(inplace=True)), lambda: sf.LIF(threshold=0.1))
    x = torch.rand(5, 3, 6)
    y = sf.Temporal(net)(x)
    expected = sf.Temporal(nn.Sequential(net.first, sf.LIF(threshold=0.1), net.second))(x)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert net.first.weight.grad is None
    assert net.second.weight.grad is not None


def test_module_with_weights() -> None:
    torch.manual_seed(0)
    model = Net(lambda n, x: n.second(n.more[0](n.first(x))), nn.PReLU())
    net = sf.spiking(model, lambda: sf.LIF(threshold=0.1))
    x = torch.rand(5, 3, 6)
    expected = sf.Temporal(nn.Sequential(model.first, sf.LIF(threshold=0.1), model.second))(x)
    assert torch.equal(sf.Temporal(net)(x), expected)
    weights = [key for key in model.state_dict() if not key.startswith("more")]
    assert list(net.state_dict().keys() ^ weights) == []
    assert "offset" in dict(net.named_buffers())


def test_every_name_has_its_own_neuron() -> None:
    """A module that is called twice is one neuron, each time from rest."""
    relu = nn.ReLU()
    block = nn.Sequential(nn.Linear(6, 6), relu)

    def forward(n: Net, x: Tensor) -> Tensor:
        return n.more[0](n.more[0](n.more[1](n.first(x))))

    net = sf.spiking(Net(forward, block, relu), lambda: sf.PLIF(0.5, 0.1))
    assert neurons(net) == ["more.0.1", "more.1"]
    x = torch.rand(4, 3, 6)
    again = net.get_submodule("more.0.0")
    layers = [net.first, sf.LIF(0.5, 0.1), again, sf.LIF(0.5, 0.1), again, sf.LIF(0.5, 0.1)]
    torch.testing.assert_close(sf.Temporal(net)(x), sf.Temporal(nn.Sequential(*layers))(x))
    with pytest.raises(ValueError, match="is called twice in one step, so its state is ambiguous"):
        sf.Temporal(net)(x, return_state=True)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_all_activations(kind: type[nn.Module]) -> None:
    activation = nn.Threshold(0.1, 0.0) if kind is nn.Threshold else kind()
    net = sf.spiking(nn.Sequential(nn.Linear(3, 3), activation), sf.LIF)
    assert [type(m) for m in net] == [nn.Linear, sf.LIF]
    assert kind in FUNCTIONS.values()
    assert kind not in (nn.ReLU, nn.Sigmoid, nn.Tanh) or kind in METHODS.values()


def test_no_pointwise_layer_of_torch_is_left_out() -> None:
    others = {"GLU", "MultiheadAttention", "Softmin", "Softmax", "Softmax2d", "LogSoftmax"}
    known = {kind.__name__ for kind in ACTIVATIONS}
    assert {*nn.modules.activation.__all__} <= known | others


def test_only_what_is_asked_for_is_replaced() -> None:
    net = sf.spiking(nn.Sequential(nn.ReLU(), nn.Sigmoid()), sf.LIF, replace=(nn.ReLU,))
    assert [type(m) for m in net] == [sf.LIF, nn.Sigmoid]


def test_neurons_that_are_there_remain() -> None:
    net = sf.spiking(nn.Sequential(sf.IF(), nn.Linear(3, 3), nn.ReLU()), sf.LIF)
    assert [type(m) for m in net] == [sf.IF, nn.Linear, sf.LIF]


def test_without_a_copy() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    assert sf.spiking(model, sf.LIF, copy=False) is model
    assert type(model[1]) is sf.LIF


@pytest.mark.parametrize("training", [True, False])
def test_modes_stay(training: bool) -> None:
    model = Net(lambda n, x: n.more[0](n.first(x)), nn.ReLU()).train(training)
    model.second.train(not training)
    net = sf.spiking(model, sf.LIF)
    assert {m.training for m in net.modules() if m is not net.second} == {training}
    assert net.second.training == (not training)
    assert model.training == training


def test_dropout_stays_random() -> None:
    net = sf.Temporal(sf.spiking(nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Dropout()), sf.IF))
    x = torch.full((2, 2, 3), 5.0)
    assert not torch.equal(net(x), net(x))
    assert torch.equal(net.eval()(x), net(x))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_results_can_be_copied(duplicate) -> None:
    net = sf.spiking(ResNet18(), sf.LIF).eval()
    x = torch.rand(2, 1, 1, 16, 16)
    assert torch.equal(sf.Temporal(duplicate(net))(x), sf.Temporal(net)(x))


def test_errors() -> None:
    model, lif = nn.Sequential(nn.ReLU(), nn.ReLU()), sf.LIF()
    with pytest.raises(TypeError, match=r"model is a function: expected a torch.nn.Module"):
        sf.spiking(lambda x: x, sf.LIF)
    with pytest.raises(TypeError, match="neuron is a LIF: expected a function that makes a new"):
        sf.spiking(model, sf.LIF())
    with pytest.raises(TypeError, match=r"neuron returned a ReLU: expected a spikefuse.Neuron"):
        sf.spiking(model, nn.ReLU)
    with pytest.raises(ValueError, match="neuron returned the same module twice"):
        sf.spiking(model, lambda: lif)
    model[1].register_forward_hook(lambda module, x, y: 2 * y)
    with pytest.raises(ValueError, match=r"'1' \(ReLU\) has hooks, which the neuron in its place"):
        sf.spiking(model, sf.LIF)
    with pytest.raises(ValueError, match="the model has no activation to replace"):
        sf.spiking(nn.Linear(2, 2), sf.LIF)
    with pytest.raises(ValueError, match="a Temporal in it: convert the network, then wrap it"):
        sf.spiking(sf.Temporal(model), sf.LIF)
