"""Trained networks as spiking ones: values that follow from the equations, and odd networks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spikefuse as sf
from spikefuse.nn.encode import direct
from spikefuse.transforms.ann_graph import RunningMean, StepsOfMean


class Odd(nn.Module):
    """A layer that is called twice, changes in place, functions, max pooling, and two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.again, self.relu = nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True)
        self.pool, self.out = nn.MaxPool2d(2), nn.Linear(8 * 4, 5)

    def forward(self, x, bias):
        x = self.relu(self.norm(self.conv(x)))
        y = F.relu6(self.again(x))
        y += x
        y = self.pool(self.relu(y))
        return self.out(y.view(y.size(0), -1)) * 2 + bias


class Attention(nn.Module):
    """Products of activations, softmax, layer norm and GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(8), nn.Linear(8, 24)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + (q @ k.transpose(-2, -1) / 8**0.5).softmax(-1) @ v
        return x + self.mlp(x)


def odd() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    net, inputs = Odd(), (torch.rand(16, 2, 4, 4), torch.randn(16, 5))
    net(*inputs)  # running statistics
    return net.eval(), inputs


@torch.no_grad()
def test_odd_network():
    net, inputs = odd()
    before, expected = copy.deepcopy(net.state_dict()), net(*inputs)
    spiking = sf.from_ann(net, [inputs], 64, share=1.0)
    y = spiking(*(direct(x, 64) for x in inputs))
    error = (y.mean(0) - expected).norm() / expected.norm()
    assert error < 0.05
    assert spiking.conversion.error[-1] == pytest.approx(float(error), rel=1e-4)
    assert spiking.conversion.error[0] > 5 * spiking.conversion.error[-1]
    names = [layer.name for layer in spiking.conversion.layers]
    assert names == ["relu", "relu6", "relu_2"]
    assert spiking.conversion.on_means == ("pool",)
    assert not any(isinstance(m, nn.BatchNorm2d | nn.ReLU) for m in spiking.modules())
    assert all(map(torch.equal, before.values(), net.state_dict().values()))
    assert torch.equal(net(*inputs), expected)
    assert all(word in str(spiking.conversion) for word in ("relu_2", "pool", "steps"))


@torch.no_grad()
def test_max_pooling_emits_spikes():
    net, x = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)), torch.rand(4, 1, 4, 4)
    y = sf.from_ann(net, x, 8, correct=False, share=1.0)(direct(x, 8))
    spikes = (y / x.max()).round()
    torch.testing.assert_close(y, spikes * x.max(), rtol=0, atol=1e-5)
    assert spikes.unique().tolist() == [0, 1]
    levels = torch.floor(8 * x / x.max() + 0.5) / 8
    torch.testing.assert_close(y.mean(0), F.max_pool2d(levels, 2) * x.max())


@torch.no_grad()
@pytest.mark.parametrize("also", [(nn.GELU,), (nn.GELU, nn.LayerNorm)], ids=len)
def test_attention(also):
    torch.manual_seed(0)
    net, x = Attention(), torch.randn(8, 6, 8)
    spiking = sf.from_ann(net, x, 32, also=also)
    errors = spiking.conversion.error
    assert errors[-1] < 0.05 < errors[0]
    assert len(spiking.conversion.layers) == len(also)
    assert all(0 < layer.rate < 1 for layer in spiking.conversion.layers)


@torch.no_grad()
def test_quantized_relu_is_computed_exactly():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), sf.nn.QCFS(0.7, levels=4), nn.Linear(8, 3))
    x = torch.randn(10, 6)
    spiking = sf.from_ann(net, x, 4, correct=False)
    assert spiking.net.get_submodule("1").threshold == pytest.approx(0.7)
    torch.testing.assert_close(spiking(direct(x, 4)).mean(0), net(x))


def test_qcfs():
    relu = sf.nn.QCFS(2.0, 4)
    x = torch.tensor([-1.0, 0.2, 0.3, 1.2, 1.3, 9.0], requires_grad=True)
    y = relu(x)
    assert y.tolist() == [0, 0, 0.5, 1, 1.5, 2]
    y.sum().backward()
    assert x.grad.tolist() == [0, 1, 1, 1, 1, 0]
    with pytest.raises(ValueError, match="threshold is 0: expected a positive"):
        sf.nn.QCFS(0)


@torch.no_grad()
def test_thresholds():
    net, x = nn.Sequential(nn.ReLU()), torch.rand(4000, 2) * torch.tensor([1.0, 3.0])
    (layer,) = sf.from_ann(net, x, 8, share=1.0).conversion.layers
    assert (layer.threshold, layer.clipped) == (pytest.approx(3, abs=0.01), 0)
    (layer,) = sf.from_ann(net, x, 8, share=0.75).conversion.layers
    assert layer.clipped == pytest.approx(0.25, abs=0.01)
    neuron = sf.from_ann(net, x, 8, share=1.0, per_channel=True).net.get_submodule("0")
    torch.testing.assert_close(neuron.threshold, torch.tensor([1.0, 3.0]), rtol=0, atol=0.01)
    # All values of a layer with few of them count.
    few = torch.arange(1.0, 65.0).unsqueeze(1)
    assert sf.from_ann(net, few, 64).net.get_submodule("0").threshold == 64
    # One outlier costs more than it brings where there are few levels.
    outlier = torch.cat([x, torch.full((1, 2), 30.0)])
    assert sf.from_ann(net, outlier, 4).net.get_submodule("0").threshold < 10
    assert (
        sf.from_ann(net, torch.zeros(3, 2) - 1, 4).net.get_submodule("0").threshold == 1
    )  # of silent neurons


@torch.no_grad()
def test_corrections_of_the_means():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU()), torch.randn(200, 6)
    target = net(x).mean(0)
    off, on = (
        sf.from_ann(net, x, 3, share=0.9, correct=correct)(direct(x, 3)).mean((0, 1))
        for correct in (False, True)
    )
    assert (on - target).abs().max() < 0.5 * (off - target).abs().max()


def test_trains_on():
    net, inputs = odd()
    spiking = sf.from_ann(net, [inputs], 4).train()
    spiking(*(direct(x, 4) for x in inputs)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in spiking.parameters())


@torch.no_grad()
def test_means_and_steps_are_inverse():
    x = torch.randn(5, 2, 3)
    torch.testing.assert_close(RunningMean()(x)[2], x[:3].mean(0))
    torch.testing.assert_close(StepsOfMean()(RunningMean()(x)), x)


class Steps(nn.Module):
    """Two layers around a function."""

    def __init__(self, function):
        super().__init__()
        self.function, self.leaky = function, nn.LeakyReLU(0.5)
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.shared = nn.ReLU(inplace=True)

    def forward(self, x, scale=2.0, mask=None):
        return self.c(self.function(self, F.relu(self.a(x)))) * scale


def twice(net, h):
    h = net.shared(net.b(h))
    k = net.b(h)
    return net.shared(k) + k  # changed in place by the second call


FUNCTIONS = {
    "square": lambda net, h: h * h,
    "mask": lambda net, h: h * (h > 0.3),
    "where": lambda net, h: torch.where(h > 0.3, h, 0.1 * h),
    "einsum": lambda net, h: torch.einsum("bi,bi->bi", h, h),
    "ratio": lambda net, h: h / (1 + h),
    "twice": twice,
    "name that is taken": lambda net, h: net.leaky(net.b(h)),
    "in place": lambda net, h: F.relu_(net.b(h)),
    "clamp": lambda net, h: net.b(h).clamp(min=0),
}


@torch.no_grad()
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    torch.manual_seed(0)
    net, x = Steps(FUNCTIONS[name]), torch.randn(32, 6)
    expected = net(x)
    spiking = sf.from_ann(net, x, 64, share=1.0)
    error = (spiking(direct(x, 64)).mean(0) - expected).norm() / expected.norm()
    assert error < 0.03
    assert spiking.conversion.error[-1] == pytest.approx(float(error), rel=1e-3)
    num_neurons = {"twice": 3, "in place": 2, "clamp": 2}.get(name, 1)
    assert len(spiking.conversion.layers) == num_neurons


@torch.no_grad()
def test_tokens():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    tokens = torch.randint(10, (16, 5))
    assert sf.from_ann(net, tokens, 32).conversion.error[-1] < 0.1


class Branch(nn.Module):
    def forward(self, x):
        return F.relu(x) if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda net, h: net.b(h) - net.b(h).mean(0), "depend on the others in the batch"),
        (lambda net, h: net.b(torch.cat([h, h]))[:4], "joins tensors along dim 0"),
        (lambda net, h: (h.view(-1, 8).mul_(-3), h)[1], "something else than"),
    ],
)
def test_refused_functions(function, message):
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=message):
        sf.from_ann(Steps(function), torch.randn(4, 6))


@pytest.mark.parametrize("at", [0, 1])
def test_a_norm_beside_a_hook_is_not_folded(at):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    net(torch.randn(64, 4))
    net[at].register_forward_hook(lambda module, x, y: 3 * y - 1)
    x = torch.randn(32, 4)
    spiking, expected = sf.from_ann(net, x, num_steps=256), net.eval()(x)
    assert (spiking(sf.nn.encode.direct(x, 256)).mean(0) - expected).norm() < 0.01 * expected.norm()


def test_weights_that_hooks_compute():
    torch.manual_seed(0)
    layer = nn.utils.spectral_norm(nn.Linear(4, 8))
    net = nn.Sequential(layer, nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    net(torch.randn(64, 4))
    x = torch.randn(32, 4)
    spiking, expected = sf.from_ann(net, x, num_steps=256), net.eval()(x)
    assert (spiking(sf.nn.encode.direct(x, 256)).mean(0) - expected).norm() < 0.01 * expected.norm()


def test_refused():
    x = torch.rand(4, 3)
    with pytest.raises(ValueError, match=r"torch\.fx cannot trace Branch"):
        sf.from_ann(Branch(), x)
    with pytest.raises(ValueError, match="no ReLU was found"):
        sf.from_ann(nn.Linear(3, 2), x)
    hooked = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    hooked[1].register_forward_hook(lambda module, x, y: 2 * y)
    with pytest.raises(ValueError, match="'1' has hooks, which the neuron in its place would not"):
        sf.from_ann(hooked, x)
    hooked = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    hooked.register_forward_hook(lambda module, x, y: y + 1)
    with pytest.raises(ValueError, match=r"recorded something else .* remove its own hooks"):
        sf.from_ann(hooked, x)
    with pytest.raises(ValueError, match="data has no batches"):
        sf.from_ann(nn.ReLU(), [])
    with pytest.raises(TypeError, match="also is"):
        sf.from_ann(nn.ReLU(), x, also=nn.GELU)
    with pytest.raises(TypeError, match="data has a dict"):
        sf.from_ann(nn.ReLU(), [{"x": x}])
    with pytest.raises(RuntimeError, match=r"cannot be multiplied \(4x3 and 5x2\)$"):
        sf.from_ann(nn.Sequential(nn.Linear(5, 2), nn.ReLU()), x)
    with pytest.raises(ValueError, match="num_steps, share are 8, 2"):
        sf.from_ann(nn.ReLU(), x, share=2)
    with pytest.raises(ValueError, match="negative is 'maybe'"):
        sf.RateIF(negative="maybe")
