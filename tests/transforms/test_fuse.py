"""A fused network computes what the plain one computes, whatever its code does with a norm."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import random
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import spikefuse as sf
from spikefuse.block import fused_norm
from spikefuse.models import MODELS, resnet18
from spikefuse.nn.encode import direct
from spikefuse.transforms.fusion import Place
from tests.nn.rows import rows_seen

# Batch norms of each model, which are all fused.
NORMS = {
    "mlp": 2,
    "conv": 2,
    "resnet18": 20,
    "resnet34": 36,
    "resnet50": 53,
    "sew_resnet18": 20,
    "sew_resnet34": 36,
    "sew_resnet50": 53,
    "ms_resnet34": 37,
    "cifar_small": 5,
    "cifar_medium": 9,
    "cifar_large": 11,
    "alexnet": 9,
    "vggsnn": 8,
    "spikformer": 29,
    **{f"mlp{n}": 0 for n in (2, 3, 4, 5)},
}
BIG = {"resnet34", "sew_resnet34", "sew_resnet50", "cifar_large", "alexnet"}


def lif() -> sf.Neuron:
    return sf.LIF(0.5, 0.3)


@pytest.mark.parametrize("name", sorted(NORMS))
def test_what_is_swapped(name: str) -> None:
    with torch.device("meta"):
        net = sf.Temporal(MODELS[name](sf.PLIF, 2, 5, (8, 8)))
    fused = sf.fuse(net)
    assert len(fused.fusion.fused) == len(fused.fusion.places) == NORMS[name]
    pools = {n for n, m in net.named_modules() if type(m) is nn.MaxPool2d}
    assert fused.fusion.pools == len(pools)
    assert [n for n, _ in fused.named_modules()] == [n for n, _ in net.named_modules()]
    for (path, module), plain in zip(fused.named_modules(), net.modules(), strict=True):
        assert type(module) is type(plain) or isinstance(module, type(plain)), path
    assert [*fused.named_parameters()] == [*net.named_parameters()]
    assert [*fused.named_buffers()] == [*net.named_buffers()]
    assert [*fused.state_dict()] == [*net.state_dict()]
    assert fused.neurons() == net.neurons()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", sorted({*NORMS} - BIG))
def test_models_give_the_same(name: str, training: bool) -> None:
    torch.manual_seed(0)
    net = sf.Temporal(MODELS[name](lif, 2, 5, (8, 8))).train(training)
    fused, x = sf.fuse(net), torch.rand(2, 2, 2, 8, 8)
    before = [b.clone() for b in net.buffers()]
    found = []
    for model in (net, fused):
        for buffer, value in zip(net.buffers(), before, strict=True):
            buffer.copy_(value)
        with torch.no_grad():
            found.append([model(x, impl="reference"), *(b.clone() for b in net.buffers())])
    torch.testing.assert_close(found[1], found[0], rtol=2e-5, atol=2e-5)
    assert len(fused.fusion.fused) == NORMS[name]


FLAG = [True]


class Net(nn.Module):
    """Layers, and how they are put together."""

    def __init__(self, forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = forward
        self.first, self.bn, self.other = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.BatchNorm1d(6)
        self.lif, self.lif2, self.same = lif(), sf.LIF(0.5, 0.2), nn.Identity()
        self.scale = nn.Parameter(torch.rand(6))
        self.full = nn.Parameter(torch.rand(12, 6))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def results(net: nn.Module, x: Tensor) -> dict[str, object]:
    """Output, gradients, buffers and the state of the generators after two calls in training, and
    the output of one in evaluation."""
    found: dict[str, object] = {}
    torch.manual_seed(5)
    random.seed(5)
    FLAG[0] = True
    net.train()
    for call in ("first", "second"):
        given = x.detach().clone().requires_grad_()
        y = net(given)
        found[f"{call} output"] = y.detach().clone()
        if y.requires_grad:
            (y * torch.arange(float(y.numel())).view(y.shape).cos()).sum().backward()
        found[f"{call} gradient"] = given.grad
    for name, parameter in net.named_parameters():
        found[f"gradient of {name}"] = parameter.grad
    found |= {name: buffer.clone() for name, buffer in net.named_buffers()}
    with torch.no_grad():
        found["evaluated"] = net.eval()(x)
    return found | {"torch": torch.get_rng_state(), "python": random.getstate()}


def compare(net: sf.Temporal, x: Tensor) -> sf.Temporal:
    """Check that the fused copy of a network computes the same, and give it."""
    fused = sf.fuse(copy.deepcopy(net))
    actual, expected = results(fused, x), results(net, x)
    assert [*actual] == [*expected]
    assert actual.pop("python") == expected.pop("python")
    for name, value in expected.items():
        if value is None:
            assert actual[name] is None, name
        else:
            torch.testing.assert_close(actual[name], value, rtol=2e-4, atol=2e-4, msg=name)
    return fused


def augmented(n: Net, x: Tensor) -> Tensor:
    y = n.bn(n.first(x))
    y += x
    return n.lif(y)


def statement(n: Net, x: Tensor) -> Tensor:
    y = n.bn(n.first(x))
    y.add_(x)
    return n.lif(y)


def potential(n: Net, x: Tensor) -> Tensor:
    spikes, v = n.lif(n.bn(n.first(x)) + x, outputs=("spikes", "v"))
    return spikes + v.sigmoid()


def chain(n: Net, x: Tensor) -> Tensor:
    y = n.lif(n.bn(n.first(x)) + n.other(x))
    return n.lif2(y + x)


FUSED = {
    "plain": (lambda n, x: n.lif(n.bn(n.first(x))), False),
    "identities": (lambda n, x: n.lif(n.same(n.same(n.bn(n.first(x))))), False),
    "residual": (lambda n, x: n.lif(n.bn(n.first(x)) + x), True),
    "residual first": (lambda n, x: n.lif(x + n.bn(n.first(x))), True),
    "what the norm reads": (lambda n, x: n.lif(n.bn(y := n.first(x)) + y), True),
    "torch.add": (lambda n, x: n.lif(torch.add(n.first(x), n.bn(x), alpha=1)), True),
    "method": (lambda n, x: n.lif(n.bn(n.first(x)).add(x.sin())), True),
    "in place": (lambda n, x: n.lif(n.bn(n.first(x)).add_(x)), True),
    "augmented": (augmented, True),
    "statement": (statement, True),
    "parameter": (lambda n, x: n.lif(n.bn(n.first(x)) + n.full), True),
    "block as a residual": (lambda n, x: n.lif(n.bn(x) + n.lif2(n.other(n.first(x)))), True),
    "shape first": (lambda n, x: n.lif((y := n.bn(n.first(x))) + x.view(y.shape)), True),
    "read again": (lambda n, x: n.lif(y := n.bn(n.first(x))) + y.sigmoid(), False),
    "sum read again": (lambda n, x: n.lif(y := n.bn(n.first(x)) + x) + y.sigmoid(), True),
    "sum and norm": (lambda n, x: n.lif((y := n.bn(n.first(x))) + x) + y.sigmoid(), True),
    "potential": (potential, True),
    "two neurons": (lambda n, x: n.lif(y := n.bn(n.first(x))) + n.lif2(y), False),
}


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
        True,
    ),
    "second changed": (second_changed, True),
    "second extended": (second_extended, True),
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


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


def stored(n: Net, x: Tensor) -> Tensor:
    n.last = n.bn(n.first(x))
    return n.lif(n.last)


def segment(function: Callable[[Tensor], Tensor], x: Tensor, reentrant: bool) -> Tensor:
    if reentrant and not x.requires_grad:  # of which PyTorch warns
        return function(x)
    return checkpoint(function, x, use_reentrant=reentrant, preserve_rng_state=False)


def closure(function: Callable[[Net, Tensor], Tensor]) -> Callable[[Net, Tensor], Tensor]:
    """A checkpointed function that reads a norm from the code around it."""

    def forward(n: Net, x: Tensor) -> Tensor:
        y = n.bn(n.first(x))
        return segment(lambda a: function(n, y) + a, x, False)

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
    "weighted sum": lambda n, x: n.lif(torch.add(n.bn(x), x, alpha=2)),
    "number": lambda n, x: n.lif(n.bn(x) + 1),
    "to itself": lambda n, x: n.lif((y := n.bn(x)) + y),
    "sums": lambda n, x: n.lif(n.bn(x) + x + x),
    "into another": lambda n, x: n.lif((y := n.first(x)).add_(n.bn(x))) + y,
    "written after": written_after,
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
    "checkpoint": lambda n, x: checkpoint(lambda y: n.lif(n.bn(y)), x, use_reentrant=False),
    "checkpoint of a reader": lambda n, x: segment(n.lif, n.bn(n.first(x)), False),
    "checkpoint of a closure": closure(lambda n, y: n.first(y)),
    "checkpoint of a neuron in a closure": closure(lambda n, y: n.first(n.lif(y))),
    "reentrant checkpoint of a norm": lambda n, x: n.lif(segment(n.bn, n.first(x), True)),
    "reentrant checkpoint of a summand": lambda n, x: n.lif(segment(n.bn, n.first(x), True) + x),
    "reentrant checkpoint, added to": lambda n, x: n.lif(segment(n.bn, n.first(x), True).add_(x)),
    "reentrant checkpoint and another reader": lambda n, x: (
        segment(n.lif, (y := n.bn(n.first(x))), True) + y
    ),
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


@pytest.mark.parametrize("name", LEFT)
def test_what_is_written_is_what_is_computed(name: str) -> None:
    net = sf.Temporal(Net(LEFT[name]))
    fused = compare(net, torch.randn(4, 3, 6))
    if name == "stored":
        optimizer = torch.optim.SGD(fused.parameters(), 1.0)
        optimizer.step()
        torch.testing.assert_close(fused.net.last, net.net.last)


@pytest.mark.parametrize("name", ["plain", "residual", "two neurons"])
@pytest.mark.parametrize("shape", [(1, 3, 6), (3, 1, 6), (1, 1, 6)])
def test_one_step_or_sample(name: str, shape: tuple[int, ...]) -> None:
    net = sf.Temporal(Net(FUSED[name][0]))
    if shape[:2] == (1, 1):
        for model in (net, sf.fuse(net)):
            with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
                model(torch.randn(shape))
    else:
        compare(net, torch.randn(shape))


@pytest.mark.parametrize("momentum", [None, 0.0, 0.3])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("track", [True, False])
def test_settings_of_a_norm(momentum: float | None, affine: bool, track: bool) -> None:
    net = Net(FUSED["read again"][0])
    net.bn = nn.BatchNorm1d(6, momentum=momentum, affine=affine, track_running_stats=track)
    fused = compare(sf.Temporal(net), torch.randn(4, 3, 6))
    assert Place("net.bn", "net.lif") in fused.fusion.fused


class OwnNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OwnNeuron(sf.LIF):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


class TwoInputs(sf.Neuron):
    v = sf.State()

    def step(self, x: Tensor, y: Tensor, v: Tensor):
        h = v + x + y
        return h, (0.5 * h,)


def test_other_norms_and_neurons() -> None:
    net = Net(FUSED["plain"][0])
    net.lif = OwnNeuron()
    assert not compare(sf.Temporal(net), torch.randn(4, 3, 6)).fusion.fused
    net = Net(lambda n, x: n.lif(n.bn(x), x))
    net.lif = TwoInputs()
    assert not compare(sf.Temporal(net), torch.randn(4, 3, 6)).fusion.fused
    net = Net(FUSED["plain"][0])
    net.bn = OwnNorm(6)
    left, *_ = compare(sf.Temporal(net), torch.randn(4, 3, 6)).fusion.left
    assert left.reason == "OwnNorm may compute something else than batch norm"


HOOKS = ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("layer", ["bn", "lif", "same", ""])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_run(kind: str, layer: str, before: bool) -> None:
    net, seen = sf.Temporal(Net(FUSED["identities"][0])), list[Tensor]()
    fused, x = None if before else sf.fuse(net), torch.randn(4, 3, 6, requires_grad=True)

    def hook(module: nn.Module, *given: tuple[Tensor, ...]) -> None:
        seen.extend(t for value in given for t in (value if isinstance(value, tuple) else (value,)))

    getattr((fused or net).net.get_submodule(layer), f"register_{kind}")(hook)
    fused = fused or sf.fuse(net)
    fused(x).sum().backward()
    expected, seen, x.grad = seen, [], None
    plain = sf.Temporal(Net(FUSED["identities"][0]))
    getattr(plain.net.get_submodule(layer), f"register_{kind}")(hook)
    plain(x).sum().backward()
    assert len(expected) == len(seen) > 0
    for a, b in zip(expected, seen, strict=True):
        torch.testing.assert_close(a + 0, b, rtol=1e-4, atol=1e-4)


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


def test_a_tensor_changed_in_between_is_refused() -> None:
    def input_changed(n: Net, x: Tensor) -> Tensor:
        y = n.first(x)
        z = n.bn(y)
        y.relu_()
        return n.lif(z)

    def residual_changed(n: Net, x: Tensor) -> Tensor:
        y = n.first(x)
        z = n.bn(x) + y
        y.relu_()
        return n.lif(z)

    def weight_changed(n: Net, x: Tensor) -> Tensor:
        z = n.bn(x)
        with torch.no_grad():
            n.bn.weight.mul_(2)
        return n.lif(z)

    for function in (input_changed, residual_changed, weight_changed):
        with pytest.raises(RuntimeError, match="was changed in place after"):
            sf.fuse(sf.Temporal(Net(function)))(torch.randn(4, 3, 6))


def test_nothing_of_a_training_step_survives() -> None:
    """Also where a gradient hook on a deferred result holds its call, and the call's final states
    the graph."""
    inputs: list[weakref.ref[Tensor]] = []

    def forward(n: Net, x: Tensor) -> Tensor:
        y = n.first(x)
        inputs.append(weakref.ref(y))
        return n.lif(Double.apply(n.bn(y)) + x)

    net = sf.fuse(sf.Temporal(Net(forward)))
    gc.disable()
    try:
        y, state = net(torch.randn(4, 3, 6), return_state=True)
        y.sum().backward()
        assert inputs[0]() is not None
        del y, state
        assert inputs[0]() is None
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


def test_inference_mode_is_plain() -> None:
    net, x = sf.Temporal(Net(FUSED["residual"][0])).eval(), torch.randn(4, 3, 6)
    fused = sf.fuse(net)
    with torch.inference_mode():
        assert torch.equal(fused(x), net(x))
    assert "inference mode" in fused.fusion.left[0].reason


def test_functional_call() -> None:
    net, x = sf.Temporal(Net(FUSED["residual"][0])), torch.randn(4, 3, 6)
    fused = sf.fuse(copy.deepcopy(net))
    given = {name: torch.rand_like(p) for name, p in net.named_parameters()}
    actual, expected = (torch.func.functional_call(m, given, (x,)) for m in (fused, net))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", ["plain", "augmented", "read again"])
def test_compiled_as_one_graph(name: str) -> None:
    net, x = sf.Temporal(Net(FUSED[name][0])), torch.randn(4, 3, 6)
    fused = sf.fuse(copy.deepcopy(net))
    y = torch.compile(fused, fullgraph=True, backend="aot_eager")(x)
    expected = net(x)
    torch.testing.assert_close(y, expected)
    for model in (y, expected):
        model.square().sum().backward()
    gradients = ([p.grad for p in m.parameters()] for m in (fused, net))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fused.net.bn.running_var, net.net.bn.running_var)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_function_inside() -> None:
    compiled = torch.compile(lambda a: torch.relu(a * 2 + 1), backend="eager")
    compare(sf.Temporal(Net(lambda n, x: n.lif(compiled(n.bn(n.first(x)))))), torch.randn(4, 3, 6))


def test_nothing_to_fuse() -> None:
    """Without norms nobody expects anything; with them there is a warning."""
    plain = sf.Temporal(nn.Sequential(nn.Linear(6, 6), sf.LIF()))
    assert sf.fuse(plain) is plain
    net = sf.Temporal(nn.Sequential(OwnNorm(6), sf.LIF()))
    with pytest.warns(UserWarning, match="no batch norm can be fused: OwnNorm may compute some"):
        assert sf.fuse(net) is net
    with pytest.raises(TypeError, match="model is a list: expected"):
        sf.fuse([net])
    with pytest.raises(TypeError, match=r"model is the class OwnNorm: .* as in OwnNorm\(\.\.\.\)"):
        sf.fuse(OwnNorm)


def residual(n: Net, x: Tensor) -> Tensor:
    return n.lif(n.bn(n.first(x)) + x)


def network() -> sf.Temporal:
    return sf.Temporal(Net(residual))


def test_state_dicts_load_both_ways() -> None:
    x = torch.randn(4, 3, 6)
    net, fused = network(), sf.fuse(network())
    for source, target in ((net, fused), (fused, net)):
        for parameter in source.parameters():
            nn.init.normal_(parameter)
        assert target.load_state_dict(source.state_dict()) == ([], [])
        actual, expected = results(copy.deepcopy(target), x), results(copy.deepcopy(source), x)
        torch.testing.assert_close(actual["evaluated"], expected["evaluated"])


def test_the_original_shares_everything() -> None:
    net = network()
    fused, x = sf.fuse(net), torch.randn(4, 3, 6)
    fused(x)
    assert net.net.bn.num_batches_tracked == 1
    fused.eval()
    assert not net.net.bn.training
    fused.net.bn.reset_running_stats()
    assert net.net.bn.num_batches_tracked == 0
    assert type(net.net.bn) is nn.BatchNorm1d
    fused.double()
    assert net.net.bn.running_mean.dtype is torch.float64


def saved(net: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(net: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(net))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, saved, pickled, copy.copy])
def test_copies(duplicate) -> None:
    net, x = network(), torch.randn(4, 3, 6)
    fused = sf.fuse(copy.deepcopy(net))
    other = duplicate(duplicate(fused))
    assert [*other.state_dict()] == [*net.state_dict()]
    actual, expected = results(other, x), results(net, x)
    torch.testing.assert_close(actual["second output"], expected["second output"])
    assert other.fusion.fused == (Place("net.bn", "net.lif", True),)
    if duplicate is not copy.copy:
        assert not fused.fusion.called


def test_replicas() -> None:
    """As nn.DataParallel makes them: parameters and buffers are plain attributes."""

    def replicated(module: nn.Module) -> nn.Module:
        if isinstance(module, sf.Neuron):
            return module
        made = module._replicate_for_data_parallel()
        for name, child in module._modules.items():
            made._modules[name] = replicated(child)
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                setattr(made, name, None if tensor is None else tensor.clone())
        return made

    net, x = network(), torch.randn(4, 3, 6)
    with torch.no_grad():
        replica = replicated(sf.fuse(copy.deepcopy(net)))
        assert torch.equal(replica(x), net(x))
    torch.testing.assert_close(replica.net.bn.running_var, net.net.bn.running_var)


def test_states() -> None:
    net, x = network().eval(), torch.randn(6, 3, 6)
    del net.net.lif2
    fused = sf.fuse(net)
    expected, state = net(x[:2], return_state=True)
    y, fused_state = fused(x[:2], return_state=True)
    assert torch.equal(y, expected)
    assert state.keys() == fused_state.keys() == {"lif"}
    assert torch.equal(fused(x[2:], state=state), net(x[2:], state=fused_state))


def test_the_original_is_freed() -> None:
    """Freed with two networks that share its modules, by garbage collection in a cycle."""
    net = network()
    fused, other = sf.fuse(net), sf.fuse(net)
    fused.eval()
    assert not other.net.bn.training
    original = weakref.ref(net.net.bn)
    cycle = [net]
    cycle.append(cycle)  # type: ignore[arg-type]
    del net, cycle
    gc.collect()
    assert original() is None
    assert fused.net.bn.num_batches_tracked == 0
    assert fused(torch.randn(4, 3, 6)).shape == (4, 3, 6)


def test_fused_twice() -> None:
    fused = sf.fuse(network())
    again = sf.fuse(fused)
    assert again is fused
    again(torch.randn(4, 3, 6))
    assert again.fusion.fused == (Place("net.bn", "net.lif", True),)


def test_only_what_temporal_runs() -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), sf.LIF(), network())
    fused = sf.fuse(model)
    assert [p.norm for p in fused.fusion.fused] == ["2.net.bn", "2.net.other"]
    assert [p.reason for p in fused.fusion.left] == ["it is outside Temporal"]
    assert type(fused) is nn.Sequential
    assert fused[0] is model[0]
    x = torch.randn(4, 6)
    torch.testing.assert_close(sf.fuse(network()).net.bn(x), network().net.bn(x))


def test_without_temporal_yet() -> None:
    net, x = network(), torch.randn(4, 3, 6)
    fused = sf.Temporal(sf.fuse(net.net))
    assert torch.equal(fused(x), net(x))
    assert fused.net.fusion.fused == (Place("bn", "lif", True),)


def test_constant_input_is_computed_once() -> None:
    torch.manual_seed(0)
    net = sf.Temporal(resnet18(lif, 2, 5, (8, 8)))
    fused, x = sf.fuse(net), direct(torch.rand(3, 2, 8, 8), 4)
    before = copy.deepcopy(net.net[1])
    with torch.no_grad():
        assert rows_seen(fused, x) == [3] + 19 * [12]
        before(net.net[0](x.flatten(0, 1)))
    torch.testing.assert_close(net.net[1].running_var, before.running_var)
    # The first norm computes one step, with nothing to gain from its neuron.
    assert fused.fusion.left[0].norm == "net.1"
    assert len(fused.fusion.fused) == 19


@pytest.mark.parametrize(
    "name", ["plain", "read again", "function", "unread", "twice", "two calls", "mean"]
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


def test_converted_models() -> None:
    plain, x = Net(lambda n, x: n.relu(n.bn(n.first(x)))), torch.randn(4, 3, 6)
    plain.relu = nn.ReLU()
    net = sf.Temporal(sf.spiking(plain, neuron=lif))
    fused = sf.fuse(net)
    torch.testing.assert_close(fused(x), net(x))
    assert Place("net.bn", "net.relu") in fused.fusion.fused


def test_small_inputs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_norm, "MIN_VALUES", 4 * 3 * 6)
    net = sf.fuse(sf.Temporal(nn.Sequential(nn.BatchNorm1d(6), sf.LIF())))

    def reason(batch: int) -> str:
        net(torch.randn(4, batch, 6))
        return "".join(place.reason for place in net.fusion.left)

    assert reason(2) == "its input has 48 values: on a CPU, fusing helps from 72"
    assert not reason(3)
    net.eval()
    assert reason(2)
    assert not reason(3)


def test_synchronized_norms() -> None:
    net = nn.SyncBatchNorm.convert_sync_batchnorm(network()).eval()
    fused, x = sf.fuse(net), torch.randn(4, 3, 6)
    assert isinstance(fused.net.bn, nn.SyncBatchNorm)
    assert torch.equal(fused(x), net(x))
    assert len(fused.fusion.fused) == 1


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


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("memory", [None, sf.memory.Bits(), sf.memory.Checkpoint()], ids=repr)
@pytest.mark.parametrize("name", SHARED)
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
