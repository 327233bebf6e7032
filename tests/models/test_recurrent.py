"""Recurrent networks: their layers, options, spikes and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf
from spikefuse.models import MODELS, recurrent


def test_layers() -> None:
    net = recurrent(sf.SEAdLIF, 1, 20, (1, 700))
    hidden = [nn.Linear, nn.BatchNorm1d, sf.Recurrent, nn.Dropout]
    kinds = [type(m) for m in net]
    assert kinds == [nn.Flatten, nn.AvgPool1d, *hidden, *hidden, nn.Linear, sf.LI]
    assert [m.in_features for m in net if type(m) is nn.Linear] == [140, 360, 360]
    assert [m.bias is None for m in net if type(m) is nn.Linear] == [True, True, False]
    assert net[-1].decay == pytest.approx(math.exp(-1 / 15))
    assert {m.p for m in net.modules() if type(m) is nn.Dropout} == {0.15}


def test_options() -> None:
    net = recurrent(sf.LIF, 2, 3, (2, 2), hidden=(5, 7, 6), pool=1, dropout=0.3, feedback=False)
    assert [m.out_features for m in net if type(m) is nn.Linear] == [5, 7, 6, 3]
    assert [m.in_features for m in net if type(m) is nn.Linear] == [8, 5, 7, 6]
    assert not any(isinstance(m, sf.Recurrent | nn.AvgPool1d) for m in net)
    assert {m.p for m in net.modules() if type(m) is nn.Dropout} == {0.3}


@pytest.mark.parametrize(
    ("neuron", "highest"), [(sf.AdLIF, (1.0, 2.0)), (sf.SEAdLIF, (120.0, 240.0))]
)
def test_adaptive_neurons_learn_their_parameters(
    neuron: type[sf.AdLIF | sf.SEAdLIF], highest: tuple[float, float]
) -> None:
    torch.manual_seed(0)
    net = recurrent(neuron, 1, 5, (1, 60), hidden=(40, 30))
    for layer in (m for m in net if isinstance(m, sf.Recurrent)):
        for value, high in zip((layer.neuron.coupling, layer.neuron.jump), highest, strict=True):
            assert value().shape == (layer.features,)
            assert 0.8 * high < value().max() <= high
        for decay in (layer.neuron.decay, layer.neuron.adaptation_decay):
            assert 0.8 < decay().min() < decay().max() < 1
            with torch.no_grad():
                decay.value.add_(1.0)
            assert decay().max() < 1
    sf.Temporal(net)(4 * torch.rand(20, 4, 60)).square().sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    fixed = recurrent(neuron, 1, 5, (1, 60), hidden=(40,), learned=False)
    assert not any(
        True for m in fixed if isinstance(m, sf.Recurrent) for _ in m.neuron.parameters()
    )


def test_neurons_of_radlif_do_not_receive_their_own_spikes() -> None:
    with torch.device("meta"):
        nets = [build(sf.AdLIF, 1, 20, (1, 700)) for build in (MODELS["recurrent_1024"], recurrent)]
    found = [m.self_connections for net in nets for m in net if isinstance(m, sf.Recurrent)]
    assert found == [False, False, True, True]


def test_inputs_of_other_data_are_not_pooled() -> None:
    net = recurrent(sf.LIF, 1, 3, (1, 40))
    assert not any(isinstance(m, nn.AvgPool1d) for m in net)


def test_the_last_inputs_are_pooled_too() -> None:
    net = recurrent(sf.LIF, 1, 3, (1, 12), pool=5)
    x = torch.arange(12.0).view(1, 1, 1, 12)
    assert torch.equal(net[:2](x), torch.tensor([[2.0, 7.0, 10.5]]))


@pytest.mark.parametrize("feedback", [True, False])
def test_spikes_and_gradients(feedback: bool) -> None:
    torch.manual_seed(0)
    net = sf.Temporal(recurrent(sf.LIF, 1, 5, (1, 60), hidden=(40, 30), feedback=feedback))
    rates: dict[nn.Module, float] = {}

    def note(module: nn.Module, inputs: tuple[Tensor, ...], spikes: Tensor) -> None:
        rates[module] = spikes.mean().item()

    for module in net.modules():
        if isinstance(module, sf.Recurrent if feedback else sf.LIF):
            module.register_forward_hook(note)
    x = (torch.rand(12, 4, 60) < 0.3).float()
    logits = net(x)
    assert logits.shape == (12, 4, 5)
    assert len(rates) == 2
    assert all(0.01 < rate < 0.9 for rate in rates.values()), rates
    logits.square().sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all()
        assert parameter.grad.any(), name


def test_spikes_depend_on_earlier_spikes_by_the_weight() -> None:
    torch.manual_seed(0)
    net = sf.Temporal(recurrent(sf.LIF, 1, 5, (1, 60), hidden=(40,), pool=5)).eval()
    x = (torch.rand(12, 4, 60) < 0.3).float()
    with torch.no_grad():
        net.net[3].bias.fill_(1.0)
        before = net(x)
        net.net[4].weight.zero_()
        after = net(x)
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


def test_networks_of_the_papers() -> None:
    shapes = {}
    with torch.device("meta"):
        for name in ("recurrent_720", "recurrent_1024"):
            net = MODELS[name](sf.AdLIF, 1, 35, (1, 700))
            first = next(m for m in net if type(m) is nn.Linear)
            dropout = next(m for m in net if type(m) is nn.Dropout)
            shapes[name] = [*first.weight.shape, dropout.p]
    assert shapes == {"recurrent_720": [720, 140, 0.15], "recurrent_1024": [1024, 700, 0.1]}
