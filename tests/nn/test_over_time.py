"""Layers that see all steps: inside Temporal, fused, recomputed, and parallel neurons."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import spikefuse as sf
from spikefuse.memory import Checkpoint
from spikefuse.scan.state_passing import StatePassing
from tests.grid import on_grid


class Mean(nn.Module):
    """The mean of the steps so far, with a learned scale per step."""

    def __init__(self, steps):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, steps))

    def forward(self, x):
        shape = (-1, *[1] * (x.ndim - 1))
        counts = torch.arange(1, len(x) + 1, device=x.device)
        return x.cumsum(0) / counts.view(shape) * self.scale.view(shape)


def network(body):
    torch.manual_seed(0)
    layers = [nn.Linear(5, 8), sf.LIF(), sf.OverTime(body), nn.Linear(8, 4), sf.LIF(0.9, 0.2)]
    return sf.Temporal(nn.Sequential(*layers))


def gradients(net, x):
    net.zero_grad()
    y = net(x)
    y.square().sum().backward()
    return y, [p.grad for p in net.parameters()]


def test_inside_a_network():
    net, x = network(Mean(6)), torch.rand(6, 3, 5)
    linear, lif, over_time, readout, last = net.net
    expected = last(readout(over_time.body(lif(linear(x)))))
    assert torch.equal(net(x), expected)
    assert torch.equal(over_time(x), over_time.body(x))  # outside of a network
    for other in (sf.fuse(net), sf.Temporal(net.net, Checkpoint()), copy.deepcopy(net)):
        torch.testing.assert_close(gradients(other, x), gradients(net, x))


def test_several_inputs():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.over_time = sf.OverTime(lambda q, k: torch.einsum("tbf,sbf->tsb", q, k).sum(1)
                                         .unsqueeze(-1).expand_as(q))  # fmt: skip

        def forward(self, x):
            return self.over_time(x, 2 * x)

    x = torch.rand(4, 3, 5)
    scores = torch.einsum("tbf,sbf->tsb", x, 2 * x).sum(1)
    torch.testing.assert_close(sf.Temporal(Attention())(x)[..., 0], scores)


def test_sequences_in_parts_are_refused():
    net, x = network(Mean(6)), torch.rand(6, 3, 5)
    match = "OverTime needs the whole sequence in one call"
    with pytest.raises(ValueError, match=match):
        net(x, return_state=True)
    with pytest.raises(ValueError, match=match):
        sf.Stream(net)(x[0])
    net.passing = StatePassing()
    with pytest.raises(ValueError, match="OverTime needs all time steps in one process"):
        net(x)


class Window(nn.Module):
    """A learned sum over three steps, of neighbours in the batch, too."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.tensor([0.25, 0.5, 1.0]))

    def forward(self, x):
        steps = len(x) - 2
        return sum(k * x[i : i + steps] for i, k in enumerate(self.kernel)).roll(1, 1)


@pytest.mark.parametrize("parts", [(1, 5), (4, 1, 1)])
def test_a_history_is_carried(parts):
    torch.manual_seed(0)
    layer = sf.OverTime(Window(), history=2)
    net, x = sf.Temporal(nn.Sequential(layer, sf.LIF(0.5))), 2 * on_grid((6, 3, 5), spread=1.0)
    y = net(x)
    k, padded = layer.body.kernel, torch.cat([torch.zeros(2, 3, 5), x])
    h = torch.stack([k[0] * padded[t] + k[1] * padded[t + 1] + k[2] * x[t] for t in range(6)])
    assert torch.equal(layer(x), h.roll(1, 1))
    assert torch.equal(y, net.net[1](h.roll(1, 1)))
    state, found = None, []
    for part in x.split(parts):
        output, state = net(part, state=state, return_state=True)
        found.append(output)
    assert torch.equal(torch.cat(found), y)
    assert torch.equal(state["net.0"][0], x[-2:].transpose(0, 1))
    assert [*net.neurons()] == ["net.1"]
    stream = sf.Stream(net)
    assert torch.equal(torch.stack([stream(step) for step in x]), y.detach())


def test_wrong_histories():
    layer = sf.OverTime(Window(), history=2)
    x = torch.rand(6, 3, 5)
    with pytest.raises(TypeError, match="OverTime with a history takes one input"):
        layer(x, x)
    with pytest.raises(ValueError, match="history is -1"):
        sf.OverTime(Window(), history=-1)
    twice = sf.Temporal(nn.Sequential(layer, layer))
    assert twice(x).shape == x.shape
    with pytest.raises(ValueError, match=r"layer 'net.0' is called twice in one step"):
        twice(x, return_state=True)

    class Hidden(nn.Module):
        def forward(self, x):
            return layer(x)

    with pytest.raises(ValueError, match="OverTime has a state, but is not a submodule"):
        sf.Temporal(Hidden())(x, return_state=True)


@pytest.mark.parametrize(
    ("body", "kind", "match"),
    [
        (3, TypeError, "body is 3: expected a module or a function"),
        (nn.Linear, TypeError, "expected a module or a function"),
        (nn.Sequential(sf.LIF()), ValueError, "body contains a neuron, or a layer over time"),
        (sf.Delay(2, 3), ValueError, "let it follow OverTime"),
    ],
)
def test_wrong_bodies(body, kind, match):
    with pytest.raises(kind, match=match):
        sf.OverTime(body)


@pytest.mark.parametrize(
    ("body", "kind", "match"),
    [
        (lambda x: x.mean(0), ValueError, r"got \[3, 8\] from its body: expected T, B = \[6, 3\]"),
        (lambda x: [x], TypeError, "got a list from its body: expected a tensor"),
    ],
)
def test_wrong_results(body, kind, match):
    with pytest.raises(kind, match=match):
        network(body)(torch.rand(6, 3, 5))


# Scales per step


def test_temporal_effective_batch_norm():
    """Against the formula, step by step, in float64: values, gradients, fused."""
    torch.manual_seed(0)
    norm, scale, x = nn.BatchNorm2d(3), sf.StepScale(5), torch.randn(5, 4, 3, 2, 2)
    with torch.no_grad():
        for p in (norm.weight, norm.bias, scale.scale):
            p.uniform_(0.5, 2.0)
    net, x = sf.Temporal(nn.Sequential(norm, scale).double()), x.double().requires_grad_()
    parameters = [x, *net.parameters()]
    mean, deviation = x.mean((0, 1, 3, 4)), x.var((0, 1, 3, 4), correction=0) + norm.eps
    steps = []
    for t in range(5):
        normed = (x[t] - mean.view(-1, 1, 1)) / deviation.sqrt().view(-1, 1, 1)
        affine = normed * norm.weight.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)
        steps.append(scale.scale[t] * affine)
    for y in (net(x), sf.fuse(net)(x)):
        torch.testing.assert_close(y, torch.stack(steps))
        found, expected = (
            torch.autograd.grad(v.pow(3).sum(), parameters, retain_graph=True)
            for v in (y, torch.stack(steps))
        )
        torch.testing.assert_close(found, expected)


def test_wrong_scales():
    with pytest.raises(ValueError, match="num_steps is 0"):
        sf.StepScale(0)
    net = sf.Temporal(nn.Sequential(sf.StepScale(3)))
    with pytest.raises(ValueError, match="StepScale received 4 time steps: expected 3"):
        net(torch.rand(4, 2, 5))
    with pytest.raises(ValueError, match="StepScale needs the whole sequence in one call"):
        net(torch.rand(3, 2, 5), return_state=True)


# Parallel neurons


@pytest.mark.parametrize("order", [None, 1, 3])
def test_psn(order):
    """Against the sum by hand, in float64."""
    torch.manual_seed(0)
    neuron, x = sf.PSN(6, order).double(), torch.randn(6, 2, 4, dtype=torch.float64)
    expected = torch.zeros_like(x)
    for t in range(6):
        seen = range(6) if order is None else range(max(0, t + 1 - order), t + 1)
        expected[t] = neuron.bias[t] + sum(neuron.weight[t, j] * x[j] for j in seen)
    assert torch.equal(neuron(x), (expected >= 0).double())
    inside = sf.Temporal(nn.Sequential(neuron))
    assert torch.equal(inside(x), neuron(x))
    neuron(x).sum().backward()
    seen = neuron.weight.grad != 0
    assert torch.equal(seen, seen & (neuron.matrix() != 0))
    assert seen.any()


def test_wrong_psn():
    with pytest.raises(ValueError, match="order is 4: expected at most num_steps = 3"):
        sf.PSN(3, 4)
    with pytest.raises(ValueError, match="PSN received 5 time steps: expected 3"):
        sf.PSN(3)(torch.rand(5, 2, 4))


@pytest.mark.parametrize("order", [1, 2, 5])
def test_sliding_psn(order, device):
    """Against the sum by hand; copies, files and streams."""
    torch.manual_seed(0)
    neuron, x = sf.SlidingPSN(order).to(device), torch.randn(7, 3, 4, device=device)
    with torch.no_grad():
        for i in range(order):
            getattr(neuron, f"w{i}").copy_(torch.randn(()))
    weights = [getattr(neuron, f"w{i}") for i in range(order)]
    padded = torch.cat([torch.zeros_like(x[:order]), x])
    h = neuron.bias + sum(w * padded[order - i : order - i + 7] for i, w in enumerate(weights))
    y, found = neuron(x, outputs=("spikes", "h"))
    torch.testing.assert_close(found, h)
    assert torch.equal(y, (found >= 0).float())
    for other in (copy.deepcopy(neuron), pickle.loads(pickle.dumps(neuron))):
        assert isinstance(other, sf.SlidingPSN)
        assert torch.equal(other(x), y)
    stream = sf.Stream(nn.Sequential(neuron))
    assert torch.equal(torch.stack([stream(step) for step in x]), y)
    with pytest.raises(ValueError, match="order is 0"):
        sf.SlidingPSN(0)


def test_gradients_without_a_state(device):
    """Of more steps than lie between two saved states."""
    neuron = sf.SlidingPSN(1).to(device)
    x = torch.randn(40, 2, 3, device=device, requires_grad=True)
    parameters, weight = [x, *neuron.parameters()], torch.randn(40, 2, 3, device=device)
    found = torch.autograd.grad((weight * neuron(x)).sum(), parameters)
    expected = torch.autograd.grad((weight * neuron(x, impl="reference")).sum(), parameters)
    torch.testing.assert_close(found, expected)
