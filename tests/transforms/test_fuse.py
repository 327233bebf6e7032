"""What is fused, what is not and why, and that the fused model is the same model."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spikefuse as sf
from spikefuse.block.block import normed
from spikefuse.models import MODELS, resnet18
from spikefuse.models.blocks import Residual
from spikefuse.nn.encode import direct
from spikefuse.transforms.fusion import Place

# Batch norms of each model, and how many a neuron follows; of the two in a sum one is fused.
NORMS = {
    "mlp": (2, 2),
    "conv": (2, 2),
    "resnet18": (20, 17),
    "resnet34": (36, 33),
    "resnet50": (53, 49),
    "sew_resnet18": (20, 20),
    "sew_resnet34": (36, 36),
    "sew_resnet50": (53, 53),
    "ms_resnet34": (37, 21),
    "cifar_small": (5, 5),
    "cifar_medium": (9, 9),
    "cifar_large": (11, 11),
    "alexnet": (9, 9),
    "vggsnn": (8, 8),
    "spikformer": (29, 29),
    **{f"mlp{n}": (0, 0) for n in (2, 3, 4, 5)},
}


def lif() -> sf.Neuron:
    return sf.LIF(0.5, 0.3)


def results(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Output, gradients and buffers of a copy in training, and its output in evaluation, by the
    eager loop: what kernels round is not the question here."""
    net = copy.deepcopy(net).train()
    y = net(x, impl="reference")
    (y * torch.arange(float(y.numel())).view(y.shape).cos()).sum().backward()
    gradients = {f"gradient of {n}": p.grad for n, p in net.named_parameters()}
    after = {"evaluated": net.eval()(x, impl="reference").detach()}
    return {"output": y.detach(), **gradients, **dict(net.named_buffers()), **after}


def assert_same(fused: nn.Module, net: nn.Module, x: Tensor) -> None:
    actual, expected = results(fused, x), results(net, x)
    assert [*actual] == [*expected]
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=2e-5, atol=2e-5, msg=name)


# Without norms, and only for neurons with a cutoff.
EVENTS = {name for name in MODELS if name.startswith("event-mlp")}


@pytest.mark.parametrize("name", sorted({*MODELS} - EVENTS))
def test_what_is_fused_of_every_model(name: str) -> None:
    with torch.device("meta"):
        net = sf.Temporal(MODELS[name](sf.PLIF, 2, 5, (8, 8)))
    fused = sf.fuse(net)
    norms, found = NORMS[name]
    assert sum(place.norm is not None for place in fused.fusion.places) == norms
    assert len(fused.fusion.fused) == found
    assert {p.neuron for p in fused.fusion.places} - {None} == {f"net.{n}" for n in net.neurons()}
    # Everything but the pooling is where it was, and nothing is there twice.
    pools = {n for n, m in net.named_modules() if type(m) is nn.MaxPool2d}
    assert fused.fusion.pools == len(pools)
    assert [n for n, _ in fused.named_modules()] == [n for n, _ in net.named_modules()]
    others = [[m for n, m in x.named_modules() if n not in pools] for x in (fused, net)]
    assert others[0][2:] == others[1][2:]
    assert [*fused.named_parameters()] == [*net.named_parameters()]
    assert [*fused.state_dict()] == [*net.state_dict()]
    assert fused.neurons() == net.neurons()


BIG = {"resnet34", "sew_resnet34", "sew_resnet50", "cifar_large", "alexnet"}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", sorted({*MODELS} - EVENTS - BIG))
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


class Net(nn.Module):
    """Layers, and how they are put together."""

    def __init__(self, forward, **layers: nn.Module) -> None:
        super().__init__()
        self.function = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def layers(**more: nn.Module) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    made = {
        "first": nn.Linear(6, 6),
        "bn": nn.BatchNorm1d(6),
        "lif": lif(),
        "other": nn.BatchNorm1d(6),
        "same": nn.Identity(),
    }
    return {**made, **more}


def fused_pair(residual: str | None = None, norm: str = "bn") -> Place:
    return Place(f"net.{norm}", "net.lif", residual)


FUSED = {
    "plain": (lambda n, x: n.lif(n.bn(n.first(x))), fused_pair()),
    "identities": (lambda n, x: n.lif(n.same(n.bn(n.first(x)))), fused_pair()),
    "residual": (lambda n, x: n.lif(n.bn(n.first(x)) + x), fused_pair("the input")),
    "residual first": (lambda n, x: n.lif(x + n.bn(n.first(x))), fused_pair("the input")),
    "torch.add": (
        lambda n, x: n.lif(torch.add(n.first(x), n.bn(x), alpha=1)),
        fused_pair("net.first"),
    ),
    "method": (lambda n, x: n.lif(n.bn(n.first(x)).add(x.sin())), fused_pair("sin")),
    "in place": (lambda n, x: n.lif(n.bn(n.first(x)).add_(x)), fused_pair("the input")),
    "identity around": (
        lambda n, x: n.lif(n.same(n.same(n.bn(x)) + n.first(x))),
        fused_pair("net.first"),
    ),
    "two norms": (lambda n, x: n.lif(n.bn(n.first(x)) + n.other(x)), fused_pair("net.bn", "other")),
    "the other first": (
        lambda n, x: n.lif((y := n.other(x), n.bn(n.first(x)))[1] + y),
        fused_pair("net.other"),
    ),
    "block as a residual": (
        lambda n, x: n.lif(n.bn(x) + n.lif2(n.other(n.first(x)))),
        fused_pair("net.lif2"),
    ),
}


def augmented(n: Net, x: Tensor) -> Tensor:
    y = n.bn(n.first(x))
    y += x
    return n.lif(y)


@pytest.mark.parametrize("name", [*FUSED, "augmented"])
def test_what_is_fused(name: str) -> None:
    forward, place = FUSED.get(name, (augmented, fused_pair("the input")))
    net = sf.Temporal(Net(forward, **layers(lif2=sf.LIF(0.5, 0.2))))
    fused = sf.fuse(net)
    assert place in fused.fusion.fused
    assert len(fused.fusion.fused) == (2 if "block" in name else 1)
    assert_same(fused, net, torch.randn(4, 3, 6))


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


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda m, x, y: None)
    return module


def written(n: Net, x: Tensor) -> Tensor:
    y = n.first(x)
    z = n.bn(y)
    y.relu_()
    return n.lif(z) + y


def into_the_other(n: Net, x: Tensor) -> Tensor:
    y = n.first(x)
    return n.lif(y.add_(n.bn(x))) + y


# The reason, and what it is said of: "bn" or "lif" alone, or "bn lif".
LEFT = {
    "own norm": (
        "bn lif",
        "OwnNorm may compute something else",
        FUSED["plain"][0],
        {"bn": OwnNorm(6)},
    ),
    "own neuron": (
        "bn lif",
        "OwnNeuron has a forward of its own",
        FUSED["plain"][0],
        {"lif": OwnNeuron()},
    ),
    "norm twice": ("bn lif", "the norm is called 2 times", lambda n, x: n.lif(n.bn(n.bn(x))), {}),
    "neuron twice": (
        "bn lif",
        "the neuron is called 2 times",
        lambda n, x: n.lif(n.lif(n.bn(x))),
        {},
    ),
    "hooks on norm": (
        "bn lif",
        "the norm has hooks",
        FUSED["plain"][0],
        {"bn": hooked(nn.BatchNorm1d(6))},
    ),
    "hooks on neuron": (
        "bn lif",
        "the neuron has hooks",
        FUSED["plain"][0],
        {"lif": hooked(lif())},
    ),
    "hooks between": (
        "bn",
        "it goes to net.same, not",
        FUSED["identities"][0],
        {"same": hooked(nn.Identity())},
    ),
    "two inputs": (
        "bn lif",
        "the neuron has further inputs",
        lambda n, x: n.lif(n.bn(x), x),
        {"lif": TwoInputs()},
    ),
    "two readers": ("bn", "it is read at 2 places", lambda n, x: n.lif(y := n.bn(x)) + y, {}),
    "sum read twice": (
        "bn",
        "the sum is read at 2 places",
        lambda n, x: n.lif(y := n.bn(x) + x) + y,
        {},
    ),
    "another layer": (
        "bn",
        "it goes to net.first, not to a neuron",
        lambda n, x: n.lif(n.first(n.bn(x))),
        {},
    ),
    "function": ("bn", "it goes to relu, not to a neuron", lambda n, x: n.lif(F.relu(n.bn(x))), {}),
    "product": ("bn", "it goes to mul, not to a neuron", lambda n, x: n.lif(n.bn(x) * x), {}),
    "weighted sum": (
        "bn",
        "it goes to add, not",
        lambda n, x: n.lif(torch.add(n.bn(x), x, alpha=2)),
        {},
    ),
    "number added": ("bn", "it goes to add, not", lambda n, x: n.lif(n.bn(x) + 1), {}),
    "added to itself": ("bn", "it goes to add, not", lambda n, x: n.lif((y := n.bn(x)) + y), {}),
    "parameter added": (
        "bn",
        "it goes to add, not",
        lambda n, x: n.lif(n.bn(x) + n.first.bias),
        {},
    ),
    "two sums": ("bn", "it goes to add, not", lambda n, x: n.lif(n.bn(x) + x + x), {}),
    "the end": ("bn", "it goes to the output, not", lambda n, x: n.bn(n.lif(x)), {}),
    "added in place": ("bn", "it goes to add_, not", into_the_other, {}),
    "written between": ("bn lif", "relu_ works in place between the two", written, {}),
    "no norm": ("lif", "it reads net.first, which is no", lambda n, x: n.bn(n.lif(n.first(x))), {}),
    "residual": ("bn", "it is added before 'net.lif'", FUSED["two norms"][0], {}),
    "not called": ("other", "it is not called", FUSED["plain"][0], {}),
    "other mode": (
        "bn",
        "'net' around it: torch.fx cannot trace it: its forward differs between training and",
        lambda n, x: n.lif(n.bn(x) if n.training else n.first(n.bn(x))),
        {},
    ),
    "control flow": (
        "bn",
        "'net' around it: torch.fx cannot trace it: TraceError",
        lambda n, x: n.lif(n.bn(x if x.sum() > 0 else -x)),
        {},
    ),
}


@pytest.mark.filterwarnings("ignore:nothing was fused")
@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_fused(name: str) -> None:
    what, reason, forward, more = LEFT[name]
    net = sf.Temporal(Net(forward, **layers(**copy.deepcopy(more))))
    fused = sf.fuse(net)
    names = [f"net.{n}" for n in what.split()]
    (place,) = [
        p for p in fused.fusion.left if [n for n in (p.norm, p.neuron) if n is not None] == names
    ]
    assert place.reason.startswith(reason)
    x = torch.randn(4, 3, 6)
    with torch.no_grad():
        assert torch.equal(fused(x, impl="reference"), net(x, impl="reference"))


def test_nothing_to_fuse() -> None:
    """Without norms nobody expects anything; with them it is said."""
    plain = sf.Temporal(nn.Sequential(nn.Linear(6, 6), sf.LIF()))
    assert sf.fuse(plain) is plain
    net = sf.Temporal(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6), sf.LIF()))
    with pytest.warns(UserWarning, match="nothing was fused: it goes to net.1, not to a neuron; i"):
        assert sf.fuse(net) is net
    with pytest.raises(TypeError, match="model is a list: expected"):
        sf.fuse([net])


def network() -> sf.Temporal:
    torch.manual_seed(0)
    net = Net(
        lambda n, x: n.head(n.lif(n.bn(n.first(x)) + x)),
        **layers(head=nn.Linear(6, 2)),
    )
    return sf.Temporal(net)


def test_state_dicts_load_both_ways() -> None:
    net, fused = network(), sf.fuse(network())
    for source, target in ((net, fused), (fused, net)):
        for parameter in source.parameters():
            nn.init.normal_(parameter)
        assert target.load_state_dict(source.state_dict()) == ([], [])
        assert_same(target, source, torch.randn(4, 3, 6))


def test_an_optimizer_made_before() -> None:
    x = torch.randn(4, 3, 6)
    after = []
    for fuse in (False, True):
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        fused = sf.fuse(net) if fuse else net
        for _ in range(3):
            optimizer.zero_grad()
            fused(x).square().sum().backward()
            optimizer.step()
        after.append(net.state_dict())
    assert not torch.equal(after[0]["net.bn.weight"], torch.ones(6))
    for name, value in after[0].items():
        torch.testing.assert_close(after[1][name], value, rtol=1e-4, atol=1e-5)


def saved(net: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, saved, copy.copy])
def test_copies(duplicate) -> None:
    torch.manual_seed(0)
    branch = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), lif(), nn.BatchNorm1d(6))
    residual = Residual(branch, nn.Identity(), lif())
    net = sf.Temporal(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), lif(), residual))
    net.net.register_buffer("offset", torch.ones(1), persistent=False)
    fused = sf.fuse(net)
    other = duplicate(duplicate(fused.net))
    assert [*other.state_dict()] == [*net.net.state_dict()]
    assert [n for n, _ in other.named_modules()] == [n for n, _ in net.net.named_modules()]
    assert sum(node.target is normed for node in other.graph.nodes) == 3
    assert_same(sf.Temporal(other), net, torch.randn(4, 3, 6))
    if duplicate is not copy.copy:
        assert duplicate(fused).fusion == fused.fusion
        nn.init.zeros_(other.get_parameter("1.weight"))
        assert net.net[1].weight.all()


def test_modes_and_layers_are_read_when_called() -> None:
    net, x = network(), torch.randn(4, 3, 6)
    fused = sf.fuse(net).eval()
    before = net.net.bn.running_mean.clone()
    fused(x)
    assert torch.equal(net.net.bn.running_mean, before)
    fused.train()(x)
    assert not torch.equal(net.net.bn.running_mean, before)
    fused.eval().net.bn = nn.BatchNorm1d(6).eval()
    nn.init.constant_(fused.net.bn.bias, 9.0)
    net.eval().net.bn = fused.net.bn
    assert torch.equal(fused(x), net(x))
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(fused)
    assert isinstance(converted.net.bn, nn.SyncBatchNorm)
    assert torch.equal(converted(x), net(x))


def test_states() -> None:
    net, x = network().eval(), torch.randn(6, 3, 6)
    fused = sf.fuse(net)
    expected, state = net(x[:2], return_state=True)
    y, fused_state = fused(x[:2], return_state=True)
    assert torch.equal(y, expected)
    assert state.keys() == fused_state.keys() == {"lif"}
    assert torch.equal(fused(x[2:], state=state), net(x[2:], state=fused_state))


def test_again() -> None:
    fused = sf.fuse(network())
    again = sf.fuse(fused)
    assert again is fused
    assert again.fusion.fused == (fused_pair("the input"),)


def test_only_what_temporal_runs() -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), sf.LIF(), network())
    fused = sf.fuse(model)
    assert [p.norm for p in fused.fusion.fused] == ["2.net.bn"]
    assert [p.reason for p in fused.fusion.places if p.norm == "0"] == ["it is outside Temporal"]
    assert type(fused) is nn.Sequential
    assert model[2].net is not fused[2].net


def test_without_temporal_yet() -> None:
    net = network()
    assert_same(sf.Temporal(sf.fuse(net.net)), net, torch.randn(4, 3, 6))


def test_constant_input_is_computed_once() -> None:
    torch.manual_seed(0)
    net = sf.Temporal(resnet18(lif, 2, 5, (8, 8)))
    fused, x = sf.fuse(net), direct(torch.rand(3, 2, 8, 8), 4)
    rows: list[int] = []
    for conv in (m for m in fused.modules() if isinstance(m, nn.Conv2d)):
        original = conv.forward
        conv.forward = lambda y, original=original: rows.append(y.shape[0]) or original(y)
    before = copy.deepcopy(net.net[1])
    with torch.no_grad():
        fused(x)
        assert rows == [3] + 19 * [12]
        before(net.net[0](x.flatten(0, 1)))
    torch.testing.assert_close(net.net[1].running_var, before.running_var)


def test_converted_models() -> None:
    """A graph made by `spiking`."""
    plain = Net(lambda n, x: n.head(F.relu(n.bn(n.first(x)))), **layers(head=nn.Linear(6, 2)))
    net = sf.Temporal(sf.spiking(plain, neuron=lif))
    fused = sf.fuse(net)
    assert fused.fusion.fused == (Place("net.bn", "net.neuron"),)
    assert [*fused.state_dict()] == [*net.state_dict()]
    assert_same(fused, net, torch.randn(4, 3, 6))
