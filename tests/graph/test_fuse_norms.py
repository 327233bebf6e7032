"""A fused norm gives what the plain one gives, whatever reads it."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spikefuse as sf
from spikefuse.graph.report import Place
from spikefuse.nn.encode import direct
from tests.graph.norm_networks import FLAG, FUSED, Double, Net, compare, lif, results


def chain(n: Net, x: Tensor) -> Tensor:
    y = n.lif(n.bn(n.first(x)) + n.other(x))
    return n.lif2(y + x)


@pytest.mark.parametrize("name", FUSED)
def test_what_is_fused(name: str) -> None:
    forward, residual = FUSED[name]
    fused = compare(sf.Temporal(Net(forward)), torch.randn(4, 3, 6))
    assert Place("net.bn", "net.lif", residual) in fused.fusion.fused


def second_extended(n: Net, x: Tensor) -> Tensor:
    y = n.other(x)
    z = n.bn(n.first(x)).add_(y)
    y += x
    return n.lif(z) + n.lif2(y)


def second_changed(n: Net, x: Tensor) -> Tensor:
    y = n.other(x)
    z = n.bn(n.first(x)) + y
    return n.lif(z) + y.relu_()


def second_changed_before(n: Net, x: Tensor) -> Tensor:
    y = n.other(x)
    z = n.bn(n.first(x)) + y
    y.relu_()
    return n.lif(z) + y


def sum_by_a_function(n: Net, x: Tensor) -> Tensor:
    z = n.bn(n.first(x)) + n.other(x)
    return n.lif(z) + Double.apply(z)


# Sums of two norms, and whether both are fused.
TWO_NORMS = {
    "plain": (chain, True),
    "in place": (lambda n, x: n.lif(n.other(x).add_(n.bn(n.first(x)))), True),
    "one input": (lambda n, x: n.lif(n.other(y := n.first(x)) + n.bn(y)), True),
    "second read again": (
        lambda n, x: n.lif((y := n.other(x)) + n.bn(n.first(x))) + y.sigmoid(),
        False,
    ),
    "second changed": (second_changed, False),
    "second extended": (second_extended, False),
    "sum read again": (lambda n, x: n.lif(y := n.bn(x) + n.other(x)) + y.sigmoid(), True),
    "sum by a function": (sum_by_a_function, True),
    "second changed before": (second_changed_before, False),
    "second read before": (
        lambda n, x: (y := n.other(x)).sigmoid() + n.lif(y + n.bn(n.first(x))),
        False,
    ),
    "second has a residual": (lambda n, x: n.lif(n.bn(n.first(x)) + (n.other(x) + x)), False),
    "sum read before": (
        lambda n, x: (y := n.bn(x) + n.other(x)).sigmoid() + n.lif(y),
        False,
    ),
}


@pytest.mark.parametrize("name", TWO_NORMS)
def test_sums_of_two_norms(name: str) -> None:
    forward, both = TWO_NORMS[name]
    fused = compare(sf.Temporal(Net(forward)), torch.randn(4, 3, 6))
    places = {place.norm for place in fused.fusion.fused if place.neuron == "net.lif"}
    assert (places == {"net.bn", "net.other"}) == both


def test_a_norm_without_a_weight_is_a_plain_residual() -> None:
    net = Net(lambda n, x: n.lif(n.bn(n.first(x)) + n.other(x)))
    net.other = nn.BatchNorm1d(6, affine=False)
    fused = compare(sf.Temporal(net), torch.randn(4, 3, 6))
    assert fused.fusion.fused == (Place("net.other", "net.lif", True),)


def bias_read_in_place(n: Net, x: Tensor) -> Tensor:
    y = n.conv(x)
    y += x
    return n.lif(y)


# Networks of `[T, B, 6, 5]`, how many biases of convolutions are fused, and how many norms.
BIASES = {
    "plain": (lambda n, x: n.lif(n.conv(x)), 1, 0),
    "residual": (lambda n, x: n.lif(x + n.conv(x)), 1, 0),
    "in place": (bias_read_in_place, 1, 0),
    "two convolutions": (lambda n, x: n.lif(n.conv(x) + n.conv2(x)), 2, 0),
    "beside a norm": (lambda n, x: n.lif(n.bn(x) + n.conv(x)), 0, 1),
    "before a norm": (lambda n, x: n.lif(n.bn(n.conv(x))), 0, 1),
    "scaled": (lambda n, x: n.lif(n.steps(n.conv(x))), 1, 0),
    "scaled and another": (lambda n, x: n.lif(n.conv2(x) + n.steps(n.conv(x))), 1, 0),
    "sum read again": (lambda n, x: n.lif(y := n.conv(x) + x) + y.sigmoid(), 1, 0),
    "read again": (lambda n, x: n.lif(y := n.conv(x)) + y.sigmoid(), 0, 0),
    "changed": (lambda n, x: n.lif(n.conv(x).relu_()), 0, 0),
    "without a batch": (lambda n, x: n.lif(n.conv(x[:, :, 0].T).T), 0, 0),
    "other dims": (lambda n, x: n.lif(n.conv(x).transpose(1, 2)), 1, 0),
}


@pytest.mark.parametrize("name", BIASES)
def test_biases_of_convolutions(name: str) -> None:
    forward, biases, norms = BIASES[name]
    fused = compare(sf.Temporal(Net(forward)), torch.randn(4, 3, 6, 5))
    found = sum(r.num_biases for r in fused.fusion.reports), len(fused.fusion.fused)
    assert found == (biases, norms)


class Rested(sf.Neuron):
    v = sf.State("rest")

    def __init__(self, rest: float | Tensor) -> None:
        super().__init__()
        self.rest, self.surrogate = rest, sf.surrogate.Arctan()

    def step(self, x: Tensor, v: Tensor) -> tuple[Tensor, tuple[Tensor]]:
        h = v + 0.5 * (x - v)
        s = self.surrogate(h - 1.0)
        return s, (h - s,)


@pytest.mark.parametrize("rest", [0.4, nn.Parameter(torch.linspace(-0.5, 0.5, 6))])
def test_neurons_whose_first_state_an_attribute_holds(rest: float | Tensor) -> None:
    net = Net(lambda n, x: n.lif(n.bn(n.first(x))))
    net.lif = Rested(rest)
    fused = compare(sf.Temporal(net), torch.randn(4, 3, 6))
    assert fused.fusion.fused == (Place("net.bn", "net.lif"),)
    fused(torch.randn(4, 5, 6))  # captures a graph for batches of any size
    assert fused.fusion.fused == (Place("net.bn", "net.lif"),)


class OverSteps(nn.Module):
    """A layer whose channels are the time steps, as in temporal attention, before a neuron."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.lif = layer, lif()

    def forward(self, x: Tensor) -> Tensor:
        return self.lif(self.layer(x.transpose(0, 1)).transpose(0, 1))


@pytest.mark.parametrize("layer", [nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4)])
def test_channels_that_are_time_steps(layer: nn.Module) -> None:
    net, x = OverSteps(layer), torch.randn(4, 3, 6)
    fused = sf.fuse(copy.deepcopy(net))
    actual, expected = results(fused, x), results(net, x)
    for name in ("first output", "first gradient", "evaluated"):
        torch.testing.assert_close(actual[name], expected[name])
    assert not fused.fusion.fused
    assert not fused.fusion.reports[0].num_biases


def bias_changed_later(n: Net, x: Tensor) -> Tensor:
    y = n.lif(n.conv(x))
    with torch.no_grad():
        n.conv.bias.add_(0.01)
    return y


def test_a_bias_that_the_network_changes() -> None:
    """A convolution does not save its bias for backward, and a block would."""
    fused = compare(sf.Temporal(Net(bias_changed_later)), torch.randn(4, 3, 6, 5))
    assert not fused.fusion.reports[0].num_biases


def test_summary_of_biases() -> None:
    net = sf.fuse(sf.Temporal(nn.Sequential(nn.Conv1d(6, 6, 3), lif())))
    net(torch.randn(4, 3, 6, 5))
    assert net.fusion.summary == "1 convolution bias fused with the neuron after them"
    net = sf.fuse(sf.Temporal(Net(lambda n, x: n.lif(n.bn(n.lif2(n.conv(x)))))))
    net(torch.randn(4, 3, 6, 5))
    expected = "1 of 2 batch norms and 1 convolution bias fused with the neuron after them"
    assert net.fusion.summary == expected


def test_bias_in_bfloat16() -> None:
    """Sums of quarters are exact, so that no rounding differs."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), sf.LIF(0.5, 0.3))
    x = torch.randint(2, (4, 2, 3, 6, 6)).bfloat16()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape) / 4)
    plain = sf.Temporal(net.bfloat16())
    fused = sf.fuse(copy.deepcopy(plain))
    for m in (plain, fused):
        m(x).sum().backward()
    assert torch.equal(fused(x), plain(x))
    for actual, expected in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=0.02, atol=0.02)
    assert sum(r.num_biases for r in fused.fusion.reports) == 1


def no_grad_stem(n: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = n.bn(n.first(x))
    return n.lif(y + x)


def no_grad_part(n: Net, x: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    y = n.lif(n.bn(n.first(x)))
    torch.set_grad_enabled(True)
    return n.lif2(n.other(y + x))


def autocast(n: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = n.bn(n.first(x))
    return n.lif(y.float()) + n.lif2(n.other(n.first(x)))


def stochastic_depth(n: Net, x: Tensor) -> Tensor:
    y = n.bn(n.first(x))
    if n.training and torch.rand(1) < 0.5:
        return n.lif(x)
    return n.lif(y)


def python_depth(n: Net, x: Tensor) -> Tensor:
    return n.lif(x if random.random() < 0.5 else n.bn(x))


def flag(n: Net, x: Tensor) -> Tensor:
    FLAG[0] = not FLAG[0]
    return n.lif(n.bn(x) + x if FLAG[0] else n.bn(x))


def written_after(n: Net, x: Tensor) -> Tensor:
    y = n.bn(n.first(x))
    z = y + x
    y.relu_()
    return n.lif(z) + y


def written_by_a_method(n: Net, x: Tensor) -> Tensor:
    y = x.detach().clone()
    z = n.bn(x) + y
    y.__imul__(2)
    return n.lif(z) + y


def in_both_modes(n: Net, x: Tensor) -> Tensor:
    """The second call changes the statistics that the first one has read."""
    training = n.training
    y = n.bn.eval()(x)
    z = n.bn.train()(n.first(x))
    n.bn.train(training)
    return n.lif(y) + n.lif2(z)


def returned(n: Net, x: Tensor) -> Tensor:
    n.last = n.bn(n.first(x)) + x
    spikes = n.lif(n.last)
    return spikes + n.lif2(n.last)


def changed_by_a_part(n: Net, x: Tensor) -> Tensor:
    y = n.first(x)
    spikes = n.lif(n.bn(x) + y)
    y[1:].mul_(2)
    return spikes + y


def stored(n: Net, x: Tensor) -> Tensor:
    n.last = n.bn(n.first(x))
    return n.lif(n.last)


def closure(function: Callable[[Net, Tensor], Tensor]) -> Callable[[Net, Tensor], Tensor]:
    """A checkpointed function that reads a norm from the code around it."""

    def forward(n: Net, x: Tensor) -> Tensor:
        y = n.bn(n.first(x))
        return sf.checkpoint(lambda a: function(n, y) + a, x)

    return forward


class Inner(torch.autograd.Function):
    """Twice its input, differentiated by a graph of its own."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = 2 * ctx.x
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return torch.autograd.grad(ctx.y, ctx.x, grad)[0]


class Neural(torch.autograd.Function):
    """A neuron with a straight-through gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, neuron: sf.Neuron) -> Tensor:
        return neuron(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


LEFT = {
    "no_grad stem": no_grad_stem,
    "no_grad part": no_grad_part,
    "autocast": autocast,
    "stochastic depth": stochastic_depth,
    "stochastic depth by random": python_depth,
    "random roll": lambda n, x: n.lif(n.bn(x).roll(int(torch.randint(4, ())), 1)),
    "flag": flag,
    "control flow": lambda n, x: n.lif(n.bn(x if x.sum() > 0 else -x)),
    "unread": lambda n, x: (n.bn(x), n.lif(x))[1],
    "stored": stored,
    "mode": lambda n, x: n.lif(n.bn(x) if n.training else n.first(n.bn(x))),
    "function": lambda n, x: n.lif(F.relu(n.bn(x))),
    "product": lambda n, x: n.lif(n.bn(x) * x),
    "product of two": lambda n, x: n.lif(n.bn(x) * n.scale * n.scale[0]),
    "product of a half": lambda n, x: n.lif(n.bn(x) * n.scale[0].bfloat16()),
    "product read again": lambda n, x: n.lif(y := n.bn(x) * n.scale) + y.sigmoid(),
    "factor of two": lambda n, x: n.lif((y := n.bn(x)) * n.scale) + y.sigmoid(),
    "weighted sum": lambda n, x: n.lif(torch.add(n.bn(x), x, alpha=2)),
    "number": lambda n, x: n.lif(n.bn(x) + 1),
    "to itself": lambda n, x: n.lif((y := n.bn(x)) + y),
    "sums": lambda n, x: n.lif(n.bn(x) + x + x),
    "into another": lambda n, x: n.lif((y := n.first(x)).add_(n.bn(x))) + y,
    "written after": written_after,
    "written by a method": written_by_a_method,
    "in both modes": in_both_modes,
    "the end": lambda n, x: n.bn(n.lif(x)),
    "twice": lambda n, x: n.lif(n.bn(n.bn(x))),
    "two calls": lambda n, x: n.lif((y := n.bn(x), n.bn(n.first(x)))[1]) + n.lif2(y),
    "channels": lambda n, x: n.lif(n.bn(x) + n.scale * 2),
    "mean": lambda n, x: n.lif(n.bn(x) + x.mean(1, keepdim=True)),
    "scalar": lambda n, x: n.lif(n.bn(x) + x.mean()),
    "larger": lambda n, x: n.lif((n.bn(x) + x.expand(2, *x.shape)).sum(0)),
    "bool": lambda n, x: n.lif(n.bn(x) + (x > 0)),
    "int": lambda n, x: n.lif(n.bn(x) + x.round().int()),
    "double": lambda n, x: n.lif((n.bn(x) + x.double()).float()),
    "half": lambda n, x: n.lif(n.bn(x) + x.bfloat16()),
    "autograd.Function": lambda n, x: n.lif(Double.apply(n.bn(n.first(x)))),
    "autograd.Function of a sum": lambda n, x: n.lif(Double.apply(n.bn(n.first(x)) + x)),
    "checkpoint": lambda n, x: sf.checkpoint(lambda y: n.lif(n.bn(y)), x),
    "checkpoint of a reader": lambda n, x: sf.checkpoint(n.lif, n.bn(n.first(x))),
    "checkpoint of a closure": closure(lambda n, y: n.first(y)),
    "checkpoint of a neuron in a closure": closure(lambda n, y: n.first(n.lif(y))),
    "checkpoint of a norm": lambda n, x: n.lif(sf.checkpoint(n.bn, n.first(x))),
    "checkpoint of a summand": lambda n, x: n.lif(sf.checkpoint(n.bn, n.first(x)) + x),
    "checkpoint, added to": lambda n, x: n.lif(sf.checkpoint(n.bn, n.first(x)).add_(x)),
    "checkpoint and another reader": lambda n, x: sf.checkpoint(n.lif, (y := n.bn(n.first(x)))) + y,
    "sum and norm": lambda n, x: n.lif((y := n.bn(n.first(x))) + x) + y.sigmoid(),
    "returned": returned,
    "changed by a part": changed_by_a_part,
    "autograd.Function and another reader": lambda n, x: Double.apply(y := n.bn(n.first(x))) + y,
    "autograd.Function and a neuron": lambda n, x: (
        n.lif((y := n.bn(n.first(x))) + x) + Double.apply(y)
    ),
    "autograd.Function with gradients": lambda n, x: Inner.apply(n.bn(n.first(x))),
    "autograd.Function that calls a neuron": lambda n, x: Neural.apply(n.bn(n.first(x)), n.lif),
    "detached": lambda n, x: n.lif(n.bn(n.first(x)).detach() + x),
    "gradient hook": lambda n, x: (
        (y := n.bn(n.first(x))).requires_grad and y.register_hook(lambda g: 2 * g),
        n.lif(y),
    )[1],
    "indexed": lambda n, x: n.lif(torch.cat([(y := n.bn(x))[:6], y[6:] * 2])),
}


# TorchDynamo says why it leaves a call to Python.
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
@pytest.mark.parametrize("name", LEFT)
def test_what_is_written_is_what_is_computed(name: str) -> None:
    net = sf.Temporal(Net(LEFT[name]))
    fused = compare(net, torch.randn(4, 3, 6))
    assert not [note for r in fused.fusion.reports for note in r.notes]
    if name == "returned":
        loss = [net(torch.randn(4, 3, 6)).sum() for net in (net, fused)]
        assert torch.autograd.grad(loss[1], fused.net.last)[0].any()
    if name == "stored":
        optimizer = torch.optim.SGD(fused.parameters(), 1.0)
        optimizer.step()
        torch.testing.assert_close(fused.net.last, net.net.last)


@pytest.mark.parametrize("name", ["plain", "residual", "two neurons", "sum read again"])
@pytest.mark.parametrize("shape", [(1, 3, 6), (3, 1, 6), (1, 1, 6)])
def test_one_step_or_sample(name: str, shape: tuple[int, ...]) -> None:
    net = sf.Temporal(Net(FUSED[name][0]))
    if shape[:2] == (1, 1):
        for model in (net, sf.fuse(net)):
            with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
                model(torch.randn(shape))
        fused = sf.fuse(net).eval()
        x = torch.randn(shape)
        torch.testing.assert_close(fused(x), net.eval()(x))
        assert len(fused.fusion.fused) == 1
    else:
        fused = compare(net, torch.randn(shape))
        assert Place("net.bn", "net.lif", FUSED[name][1]) in fused.fusion.fused


@pytest.mark.parametrize(
    "forward",
    [
        FUSED["sum read again"][0],
        lambda n, x: n.lif(y := n.bn(n.conv(x))) + y.sigmoid(),
        lambda n, x: n.lif(y := n.bn(n.conv(x)) + x) + y.sigmoid(),
    ],
    ids=["sum", "norm of maps", "sum of maps"],
)
def test_sizes_that_change(forward) -> None:
    plain = sf.Temporal(Net(forward))
    fused = sf.fuse(copy.deepcopy(plain))
    for T, B, length in ((4, 3, 5), (3, 2, 7), (4, 6, 4)):
        x = (
            torch.randn(T, B, 6, length)
            if "conv" in forward.__code__.co_names
            else torch.randn(T, B, 6)
        )
        for training in (True, False):
            actual, expected = (net.train(training)(x) for net in (fused, plain))
            torch.testing.assert_close(actual, expected)
    assert len(fused.fusion.fused) == 1


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("scale per step", [(4, 5), (4, 3), (4, 6)]),
        ("plain", [(4, 5), (4, 3), (2, 3), (5, 1), (5, 2)]),
        ("shape first", [(4, 5), (4, 3), (2, 3)]),
    ],
)
def test_each_of_several_sizes_is_fused(name: str, sizes: list[tuple[int, int]]) -> None:
    """TorchDynamo computes with sizes in the graph once they have changed."""
    plain = sf.Temporal(Net(FUSED[name][0]))
    fused = sf.fuse(copy.deepcopy(plain))
    for T, B in sizes:
        x = torch.randn(T, B, 6)
        torch.testing.assert_close(fused(x), plain(x))
        assert len(fused.fusion.fused) == 1, (T, B)


class Branches(nn.Module):
    """Residual blocks, through which a gradient has several paths."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        branch = lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))  # noqa: E731
        self.branches = nn.ModuleList(branch() for _ in range(depth))
        self.neurons = nn.ModuleList(lif() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for branch, neuron in zip(self.branches, self.neurons, strict=True):
            x = neuron(branch(x) + x)
        return x


@pytest.mark.parametrize("kind", ["full_backward_hook", "full_backward_pre_hook"])
@pytest.mark.parametrize("layers", ["neurons", "branches"])
@pytest.mark.parametrize("gradients", ["backward", "grad"])
def test_backward_hooks_run_once(kind: str, layers: str, gradients: str) -> None:
    """Also where a hooked module reads or returns a deferred tensor."""
    net = sf.Temporal(Branches(3))
    fused, x = sf.fuse(copy.deepcopy(net)), torch.randn(4, 3, 6)
    found = []
    for model in (net, fused):
        seen: list[Tensor] = []
        for layer in getattr(model.net, layers):
            getattr(layer, f"register_{kind}")(lambda _, *g, seen=seen: seen.append(g[-1][0]))
        loss = (model(x) * torch.arange(6.0)).sum()
        if gradients == "backward":
            loss.backward()
            seen += [p.grad for p in model.parameters() if p.grad is not None]
        else:
            seen += torch.autograd.grad(loss, [*model.parameters()])
        found.append(seen)
    assert len(found[0]) == len(found[1]) == 3 + len([*net.parameters()])
    for actual, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-4)


def input_changed(n: Net, x: Tensor) -> Tensor:
    y = n.first(x)
    z = n.bn(y.clone())
    y.relu_()
    return n.lif(z)


def residual_changed(n: Net, x: Tensor) -> Tensor:
    y = n.first(x)
    z = n.bn(x) + y
    y.relu_()
    return n.lif(z)


def weight_changed(n: Net, x: Tensor) -> Tensor:
    z = n.bn(x.detach())
    with torch.no_grad():
        n.bn.bias.mul_(2)
    return n.lif(z.detach() + x)


@pytest.mark.parametrize("forward", [input_changed, residual_changed, weight_changed])
def test_a_tensor_changed_in_between(forward) -> None:
    fused = compare(sf.Temporal(Net(forward)), torch.randn(4, 3, 6))
    assert not fused.fusion.fused


def test_nothing_of_a_training_step_survives() -> None:
    net = sf.fuse(sf.Temporal(Net(chain)))
    net(torch.randn(4, 3, 6, requires_grad=True), return_state=True)  # captures it
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(4, 3, 6, requires_grad=True)
        y, state = net(x, return_state=True)
        y.sum().backward()
        given = weakref.ref(x)
        del x, y, state
        assert given() is None
    finally:
        gc.enable()


def test_a_mode_changed_in_between() -> None:
    def forward(n: Net, x: Tensor) -> Tensor:
        y = n.bn.train(False)(x)
        n.bn.train(True)
        return n.lif(y)

    fused = compare(sf.Temporal(Net(forward)), torch.randn(4, 3, 6))
    assert fused.fusion.places[0].neuron == "net.lif"


def test_a_parameter_replaced_in_between() -> None:
    def forward(n: Net, x: Tensor) -> Tensor:
        y, weight = n.bn(x), n.bn.weight
        n.bn.weight = nn.Parameter(2 * weight.detach())
        spikes = n.lif(y)
        n.bn.weight = weight
        return spikes

    compare(sf.Temporal(Net(forward)), torch.randn(4, 3, 6))


def test_a_neuron_that_is_not_a_submodule() -> None:
    neuron = sf.LIF()
    net = sf.Temporal(Net(lambda n, x: n.lif(neuron(n.bn(x)))))
    compare(net, torch.randn(4, 1, 6))
    with pytest.raises(ValueError, match="not a submodule"):
        sf.fuse(net)(torch.randn(4, 3, 6))


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_function_inside() -> None:
    compiled = torch.compile(lambda a: torch.relu(a * 2 + 1), backend="eager")
    compare(sf.Temporal(Net(lambda n, x: n.lif(compiled(n.bn(n.first(x)))))), torch.randn(4, 3, 6))


@pytest.mark.parametrize(
    "name",
    ["plain", "read again", "function", "unread", "twice", "two calls", "mean", "scale per step"],
)
def test_constant_input(name: str) -> None:
    forward = LEFT[name] if name in LEFT else FUSED[name][0]
    x = direct(torch.randn(3, 6), 4)
    net = sf.Temporal(Net(forward))
    fused, varying = sf.fuse(copy.deepcopy(net)), copy.deepcopy(net)
    actual, expected = fused(x), varying(x.clone())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    for (label, a), b in zip(fused.named_buffers(), varying.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=label)


@pytest.mark.parametrize(
    "residual",
    [
        lambda x, scale: x.mean((2, 3), keepdim=True),
        lambda x, scale: scale[:, None, None] * 2,
        lambda x, scale: scale.sum(),
        lambda x, scale: F.embedding(torch.arange(len(x)) % 1, scale[None])[..., None, None],
        lambda x, scale: x.expand(2, *x.shape),
        lambda x, scale: x > 0,
    ],
    ids=["mean", "channels", "scalar", "embedding", "larger", "bool"],
)
def test_residuals_of_other_shapes_and_dtypes_than_a_map(residual) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn, self.lif = nn.BatchNorm2d(3), sf.LIF(threshold=0.3)
            self.scale = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            y = self.bn(x) + residual(x, self.scale)
            return self.lif(y if y.ndim == 4 else y.sum(0))

    torch.manual_seed(0)
    compare(sf.Temporal(Sum()), torch.randn(4, 2, 3, 5, 5))


class SharedNorm(nn.Module):
    """One norm at two places, of which one is behind a neuron."""

    def __init__(self, forward) -> None:
        super().__init__()
        self.function, self.first = forward, nn.Linear(6, 8, bias=False)
        self.bn = nn.BatchNorm1d(8)
        self.lif, self.last = sf.LIF(threshold=0.2), sf.LIF(threshold=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.first(x))


def in_another_order(n, z):
    y = n.bn(n.lif(z))
    return n.last(y + n.bn(z))


def read_in_another_order(n, z):
    y = n.lif(z)
    a, b = n.bn(z), n.bn(y)
    return n.last(b + a)


def unread(n, z):
    a = n.bn(z)
    n.bn(n.lif(z))
    return n.last(a)


SHARED = {
    "in a row": lambda n, z: n.last(n.bn(n.lif(n.bn(z)))),
    "with a sum": lambda n, z: n.last(n.bn(z + n.lif(a := n.bn(z)))) + a,
    "in another order": in_another_order,
    "read in another order": read_in_another_order,
    "unread": unread,
}


# Each pair, not each three of them.
@pytest.mark.parametrize(
    ("name", "memory", "constant"),
    [
        pytest.param(name, memory, (i + j) % 2 == 0, id=f"{name}-{memory}")
        for i, name in enumerate(SHARED)
        for j, memory in enumerate((None, sf.memory.Bits(), sf.memory.Checkpoint()))
    ],
)
def test_norm_at_two_places(name: str, memory, constant: bool) -> None:
    """Its running statistics depend on the order of the calls."""
    torch.manual_seed(0)
    net = sf.Temporal(SharedNorm(SHARED[name]))
    fused = sf.fuse(sf.Temporal(copy.deepcopy(net.net), memory))
    x = direct(torch.randn(3, 6), 5)
    x = x if constant else x.clone()
    expected, actual = net(x.clone(), impl="reference"), fused(x)
    torch.testing.assert_close(actual, expected)
    weights = torch.randn_like(actual)
    (expected * weights).sum().backward()
    (actual * weights).sum().backward()
    pairs = [*zip(fused.buffers(), net.buffers(), strict=True)]
    pairs += [(p.grad, q.grad) for p, q in zip(fused.parameters(), net.parameters(), strict=True)]
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def hooked_late(n: Net, x: Tensor) -> Tensor:
    spikes = n.lif(y := n.bn(n.first(x)))
    if y.requires_grad:
        y.register_hook(lambda g: 2 * g)
    return spikes


def view_hooked_late(n: Net, x: Tensor) -> Tensor:
    spikes = n.lif(y := n.same(n.bn(n.first(x))).view(x.shape))
    if y.requires_grad:
        y.register_hook(lambda g: 2 * g)
    return spikes


def reads_statistics(n: Net, x: Tensor) -> Tensor:
    return n.lif(n.bn(n.first(x))) + n.bn.running_mean


def asks_for_tensors(n: Net, x: Tensor) -> Tensor:
    y = n.bn(n.first(x))
    spikes = n.lif(2 * y if isinstance(y, torch.Tensor) else y)
    return spikes if type(spikes) is torch.Tensor else -spikes


@pytest.mark.parametrize("forward", [hooked_late, view_hooked_late, reads_statistics])
def test_what_code_does_after_the_neuron(forward: Callable[..., Tensor]) -> None:
    compare(sf.Temporal(Net(forward)), torch.randn(4, 3, 6))


def test_code_that_asks_for_tensors_under_checkpoint() -> None:
    x = torch.randn(4, 3, 6)
    policies = None, sf.memory.Checkpoint()
    expected, found = (results(sf.Temporal(Net(asks_for_tensors), m), x) for m in policies)
    torch.testing.assert_close(found["first output"], expected["first output"])
    torch.testing.assert_close(found["first gradient"], expected["first gradient"])


def test_gradients_of_a_norm_after_the_call() -> None:
    def kept(n: Net, x: Tensor) -> Tensor:
        n.seen.append(n.bn(n.first(x)))
        return n.lif(n.seen[-1])

    x, found = torch.randn(4, 3, 6), []
    for net in (sf.Temporal(Net(kept)), sf.fuse(sf.Temporal(Net(kept)))):
        loss = (net(x) * torch.arange(6.0)).sum()
        z = net.net.seen[-1]
        z.retain_grad()
        (gradient,) = torch.autograd.grad(loss, z, retain_graph=True)
        loss.backward()
        found.append((gradient, z.grad))
    assert found[0][0].any()
    torch.testing.assert_close(*found)


class Assigned(nn.Module):
    """Assigns a parameter of its neuron in each call, of another kind than the neuron's own."""

    def __init__(self, kind: str, block: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.neuron = kind, sf.LIF(threshold=torch.tensor(0.3) if kind == "float" else 1)
        self.raw = nn.Parameter(torch.rand(5) if kind == "channel" else torch.tensor(0.1))
        norm = nn.BatchNorm1d(5)
        self.layer = sf.nn.Block(norm, self.neuron) if block else nn.Sequential(norm, self.neuron)

    def forward(self, x: Tensor) -> Tensor:
        self.neuron.threshold = 0.5 if self.kind == "float" else nn.functional.softplus(self.raw)
        return self.layer(x)


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("kind", ["scalar", "channel", "float"])
@pytest.mark.parametrize(
    "compiled",
    [sf.fuse, lambda net: torch.compile(net, backend="spikefuse")],
    ids=["fuse", "compile"],
)
def test_a_parameter_that_the_network_assigns(compiled, kind: str, block: bool) -> None:
    torch.compiler.reset()
    results = []
    for make in (lambda net: net, compiled):
        net = make(sf.Temporal(Assigned(kind, block)))
        torch.manual_seed(1)
        x = torch.randn(6, 3, 5)
        for _ in range(2):
            y = net(x)
        y.sum().backward()
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        results.append([y, *gradients])
        assert len(gradients) == (2 if kind == "float" else 3)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    if compiled is sf.fuse and not block:
        assert net.fusion.fused


@pytest.mark.parametrize("block", [False, True])
def test_a_constant_that_the_network_assigns(block: bool) -> None:
    class Soft(Assigned):
        def forward(self, x: Tensor) -> Tensor:
            self.neuron.reset, self.neuron.detach_reset = "soft", True
            return self.layer(x)

    torch.compiler.reset()
    x, results = 3 * torch.randn(6, 3, 5), []
    for make in (lambda net: net, sf.fuse, lambda net: torch.compile(net, backend="spikefuse")):
        net = make(sf.Temporal(Soft("scalar", block)))
        y = net(x)
        y.sum().backward()
        results.append([y, *(p.grad for p in net.parameters() if p.grad is not None)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(results[2], results[0], rtol=1e-4, atol=1e-4)


def test_a_constant_that_becomes_a_value() -> None:
    class Cutoff(Assigned):
        def forward(self, x: Tensor) -> Tensor:
            self.neuron.surrogate.cutoff = -0.25
            return self.layer(x)

    torch.compiler.reset()
    net = torch.compile(sf.Temporal(Cutoff("scalar", block=False)), backend="spikefuse")
    with pytest.raises(Exception, match=r"assigns a float to 'surrogate.cutoff' of a LIF, a const"):
        net(torch.randn(6, 3, 5))
