"""Weights and states of few bits: values from loops over all candidates, and refused layers."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrize import register_parametrization

import spikefuse as sf


class Own(sf.Neuron):
    """A user's neuron: two states, a learned parameter, and one per channel."""

    v, w = sf.State(), sf.State()

    def __init__(self) -> None:
        super().__init__()
        self.decay: Any = sf.LearnableFraction(0.9)
        self.gain = nn.Parameter(torch.linspace(0.3, 0.7, 6))
        self.surrogate, self.rho = sf.surrogate.Arctan(), 0.97

    def step(self, x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        h = self.decay * v + x - self.gain * w
        s = self.surrogate(h - 1.0)
        return s, (h * (1 - s), self.rho * w + s)


class Net(nn.Module):
    """A network with code of its own, norms and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.own, self.hidden, self.norm2 = Own(), nn.Linear(6, 5), nn.BatchNorm1d(5)
        self.recurrent, self.out = sf.Recurrent(sf.LIF(0.9), 5, bias=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.own(self.norm(self.conv(x))).mean((2, 3))
        y: Tensor = self.out(self.recurrent(self.norm2(self.hidden(x))))
        return y


def made() -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    net: Any = sf.Temporal(Net())
    x = torch.randn(6, 8, 2, 4, 4)
    with torch.no_grad():
        net(x, impl="reference")  # running statistics
        net.net.norm.weight.uniform_(0.5, 2.0)
    return net, x


def nearest(row: np.ndarray, most: int) -> np.ndarray:
    """The multiples of a power of two that are closest to a row."""
    candidates = [
        np.clip(np.rint(row / step), -most, most) * step for step in 2.0 ** np.arange(-12, 4)
    ]
    return min(candidates, key=lambda values: float(((values - row) ** 2).sum()))


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_weights(bits: int) -> None:
    net, x = made()
    before = copy.deepcopy(net.state_dict())
    result: Any = sf.quantize(net, x, bits, None)
    assert result.training
    assert result.net.norm.__class__ is nn.Identity
    assert all(map(torch.equal, before.values(), net.state_dict().values()))
    layer, most = result.net.out, 2 ** (bits - 1) - 1
    steps = layer.parametrizations.weight[0].step
    for i, row in enumerate(net.net.out.weight.detach().double().numpy()):
        assert layer.weight[i].tolist() == nearest(row, most).tolist()
        units = layer.weight[i] / steps[i]
        assert units.abs().max() <= most
        assert torch.equal(units, units.round())
        fine = 2.0 ** (bits - 8) * steps[i].item()
        bias = net.net.out.bias[i].item()
        assert layer.bias[i].item() == np.rint(bias / fine) * fine


def test_gradients_pass_and_stop_at_the_limits() -> None:
    net: Any = sf.Temporal(nn.Linear(3, 1, bias=False))
    with torch.no_grad():
        net.net.weight.copy_(torch.tensor([[0.2, -0.9, 1.0]]))
    result: Any = sf.quantize(net, torch.ones(1, 1, 3), weights=2)
    assert result.net.weight.tolist() == [[0, -1, 1]]
    original = result.net.parametrizations.weight.original
    with torch.no_grad():
        original[0, 2] = 1.8  # saturates
    result(torch.tensor([[[1.0, 2.0, 3.0]]])).sum().backward()
    assert result.net.weight.tolist() == [[0, -1, 1]]
    assert original.grad.tolist() == [[1, 2, 0]]


@torch.no_grad()
def test_folded_norms_and_rounded_states() -> None:
    net, x = made()
    net.eval()
    result: Any = sf.quantize(net, x, 8, 8)
    assert not result.training
    y, expected = result(x, impl="reference"), net(x, impl="reference")
    assert (y - expected).norm() < 0.3 * expected.norm()  # some spikes differ
    unrounded: Any = sf.quantize(net, x, None, 16)
    assert isinstance(unrounded.net.norm, nn.BatchNorm2d)
    for bits, quantized in ((8, result), (16, unrounded)):
        own = quantized.net.own
        inputs = 3 * torch.randn(9, 2, 6, 4, 4)
        _, v, w = own(inputs, outputs=("spikes", "v", "w"), impl="reference")
        for name, state in (("v", v), ("w", w)):
            step = getattr(own, f"{name}_step").item()
            units = state / step
            assert np.frexp(step)[0] == 0.5
            assert torch.equal(units, units.round())
            assert units.min() >= -(2 ** (bits - 1))
            assert units.max() < 2 ** (bits - 1)
        assert own.rho == 248 / 256
        assert own.decay.item() == 230 / 256
        assert not any(p.requires_grad for p in own.parameters())
        lif = quantized.net.recurrent.neuron
        assert lif.state_bits == bits
        assert lif.v_step > 0


@torch.no_grad()
def test_state_dict_holds_the_steps() -> None:
    net, x = made()
    trained, other = sf.quantize(net, x), sf.quantize(net, 100 * x)
    other.load_state_dict(trained.state_dict())
    assert torch.equal(trained(x, impl="reference"), other(x, impl="reference"))


def test_outputs_with_tiny_weights() -> None:
    """Biases do not saturate, and steps are at least 1/256 of the largest one."""
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight[:2] = torch.tensor([[0.0], [1e-7]])
        layer.weight[2:] = torch.tensor([[0.5**10], [1.0]])
        layer.bias.copy_(torch.tensor([0.3, 500.0, 0.3, 0.3]))
    result: Any = sf.quantize(sf.Temporal(layer), torch.ones(1, 1, 4))
    assert result.net.parametrizations.weight[0].step.tolist() == [2**-14, 2**-14, 2**-14, 2**-6]
    assert result.net.weight[:, 0].tolist() == [0, 0, 2**-10, 1]
    assert torch.allclose(result.net.bias[:3], layer.bias[:3], rtol=1e-4)
    nn.init.zeros_(layer.weight)
    result = sf.quantize(sf.Temporal(layer), torch.ones(1, 1, 4))
    assert result.net.parametrizations.weight[0].step.tolist() == [2**-7] * 4  # they may be learned
    assert torch.allclose(result.net.bias, layer.bias, atol=2**-8)


def test_half_precision_rounds_in_float32() -> None:
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.mul_(0.01)  # so that biases are many steps
    expected: Any = sf.quantize(
        sf.Temporal(copy.deepcopy(layer).half().float()), torch.ones(1, 1, 4)
    )
    result: Any = sf.quantize(sf.Temporal(layer.half()), torch.ones(1, 1, 4).half())
    assert torch.equal(result.net.weight, expected.net.weight.half())
    assert torch.equal(result.net.bias, expected.net.bias.half())
    converted = expected.half()
    assert torch.equal(converted.net.weight, result.net.weight)
    assert torch.equal(converted.net.bias, result.net.bias)


class TwoNames(nn.Module):
    """Layers that have two names, as in many residual networks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.layers = nn.Sequential(self.first, nn.BatchNorm1d(4), self.second, self.norm)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


class Tied(nn.Module):
    """A network that reads the weight of a layer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(self.layer(x)), self.layer.weight.t())


@torch.no_grad()
def test_norms_of_layers_with_two_names() -> None:
    torch.manual_seed(0)
    net, x = sf.Temporal(TwoNames()), 3 * torch.randn(4, 8, 4) + 1
    net(x)  # running statistics
    expected = net.eval()(x)
    assert (sf.quantize(net, x)(x) - expected).norm() < 0.03 * expected.norm()
    with pytest.raises(ValueError, match=r"'net.norm' is a BatchNorm1d"):
        sf.quantize(sf.Temporal(Tied()), x)


class InTraining(nn.Linear):
    """A network with a norm that it calls in training only."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.head = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return (y, self.head(y)) if self.training else y


class Last(nn.Module):
    """The body of a loop that returns the spikes of its neuron."""

    def __init__(self) -> None:
        super().__init__()
        self.li = sf.LI(0.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z: Tensor = self.li(x)
        return z


def test_steps_of_states_hold_all_calls() -> None:
    """Of a neuron in a loop, which is called at each step, and of one that is quantized before."""
    x = torch.zeros(3, 1, 1)
    x[1], x[2] = 127.0, -63.0  # the states are 0, 127 and 0.5
    net: Any = sf.Temporal(sf.Loop(Last(), (1,)))
    result: Any = sf.quantize(net, x)
    assert result.net.body.li.v_step == 1
    coarse = sf.quantize(result, x, None, 2)
    again: Any = sf.quantize(coarse, x, None, 8)
    assert again.net.body.li.v_step == 1
    assert sf.quantize(net, 0 * x).net.body.li.v_step == 1  # type: ignore[union-attr]


def test_parameters_of_other_kinds() -> None:
    class Kinds(sf.Neuron):
        v = sf.State()

        def __init__(self) -> None:
            super().__init__()
            self.limit, self.count = float("inf"), torch.tensor([3, 0, 1000])

        def step(self, x: Tensor, v: Tensor) -> tuple[Tensor, tuple[Tensor]]:
            h = torch.clamp(v + x * self.count, max=self.limit)
            return h, (h,)

    result: Any = sf.quantize(sf.Temporal(Kinds()), torch.ones(2, 1, 3))
    assert result.net.limit == float("inf")
    assert result.net.count.tolist() == [3, 0, 1000]


def test_modes_of_layers_remain() -> None:
    net = sf.Temporal(nn.Sequential(nn.Linear(4, 4), nn.Dropout()))
    net.net.get_submodule("1").eval()
    result: Any = sf.quantize(net, torch.ones(1, 1, 4))
    assert [result.training, result.net[0].training, result.net[1].training] == [True, True, False]


def test_refusals() -> None:
    x = torch.rand(2, 3, 4)

    def temporal(*layers: nn.Module) -> sf.Temporal:
        return sf.Temporal(nn.Sequential(*layers))

    with pytest.raises(TypeError, match=r"net is Linear.*: expected a spikefuse\.Temporal"):
        sf.quantize(nn.Linear(4, 4), x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weights is 9: expected bits from 2 to 8"):
        sf.quantize(temporal(nn.Linear(4, 4)), x, weights=9)
    with pytest.raises(ValueError, match="states is True"):
        sf.quantize(temporal(nn.Linear(4, 4)), x, states=True)
    with pytest.raises(ValueError, match=r"'net.1' is a LayerNorm, which cannot be quantized"):
        sf.quantize(temporal(nn.Linear(4, 4), nn.LayerNorm(4)), x)
    with pytest.raises(ValueError, match=r"'net.0' is a BatchNorm1d, which cannot"):
        sf.quantize(temporal(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4)), x)
    quantized = sf.quantize(temporal(nn.Linear(4, 4)), x)
    with pytest.raises(ValueError, match=r"'net.0' has parametrizations"):
        sf.quantize(quantized, x)

    for at in (0, 1):
        net = temporal(nn.Linear(4, 4), nn.BatchNorm1d(4))
        net.net[at].register_forward_hook(lambda module, x, y: 2 * y)
        with pytest.raises(ValueError, match=r"'net.1' is a BatchNorm1d, .* without hooks"):
            sf.quantize(net, x)
    with pytest.raises(ValueError, match=r"'net.0' has parametrizations, .* such as weight_norm"):
        sf.quantize(temporal(nn.utils.spectral_norm(nn.Linear(4, 4))), x)  # type: ignore[no-untyped-call]

    with pytest.raises(ValueError, match=r"'net.head.1' is a BatchNorm1d, which cannot"):
        sf.quantize(sf.Temporal(InTraining()), x)

    class Unused(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.lif = sf.LIF()

    with pytest.raises(ValueError, match=r"'net.lif' is not called"):
        sf.quantize(sf.Temporal(Unused()), x)


class Clamp(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return value.clamp(0, 0.25)


def test_a_parametrized_neuron() -> None:
    net, x = sf.Temporal(nn.Sequential(nn.Linear(4, 4), sf.LIF())), torch.rand(3, 2, 4)
    net.net[1].decay = nn.Parameter(torch.tensor(0.5))
    register_parametrization(net.net[1], "decay", Clamp(), unsafe=True)
    quantized: Any = sf.quantize(net, x, states=None)
    assert quantized.net[1].decay.item() == 0.25
    with pytest.raises(ValueError, match=r"'net.1' has parametrizations, whose values cannot be"):
        sf.quantize(net, x, weights=None)


def test_pruned_weights_stay_zero() -> None:
    """Also after a backward pass, when hooks have computed the pruned weights."""
    net = sf.Temporal(nn.Sequential(nn.Linear(6, 5), sf.LIF()))
    prune.l1_unstructured(net.net[0], "weight", 0.5)
    x = torch.rand(3, 4, 6)
    net(x).sum().backward()
    quantized = sf.quantize(net, x)
    assert torch.equal(quantized.net[0].weight == 0, net.net[0].weight_mask == 0)
