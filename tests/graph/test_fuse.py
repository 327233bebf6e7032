"""What `fuse` replaces, and what the fused network shares with the original."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf
from spikefuse.graph import captured
from spikefuse.graph.report import Place
from spikefuse.models import MODELS
from tests.graph.norm_networks import FUSED, Net, compare, lif, network, results

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


@pytest.mark.parametrize("name", sorted(NORMS))
def test_what_is_shared(name: str) -> None:
    with torch.device("meta"):
        net = sf.Temporal(MODELS[name](sf.PLIF, 2, 5, (8, 8)))
    fused = sf.fuse(net)
    assert fused is not net
    assert [n for n, _ in fused.named_modules()] == [n for n, _ in net.named_modules()]
    assert not {*fused.modules()} & {*net.modules()}
    assert [*fused.named_parameters()] == [*net.named_parameters()]
    assert [*fused.named_buffers()] == [*net.named_buffers()]
    assert [*fused.state_dict()] == [*net.state_dict()]
    assert [*fused.neurons()] == [*net.neurons()]
    assert fused.fusion.summary == "not captured yet: the first call does it"


# tests/models trains a small network of each family.
TRAINED = {"cifar_medium", "mlp", "mlp2", "resnet18"}


@pytest.mark.parametrize(
    ("name", "training"),
    [(name, False) for name in sorted({*NORMS} - BIG)] + [(name, True) for name in sorted(TRAINED)],
)
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
            found.append([model(x), *(b.clone() for b in net.buffers())])
    torch.testing.assert_close(found[1], found[0], rtol=2e-5, atol=2e-5)
    assert len(fused.fusion.fused) == NORMS[name]


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
    assert left == Place("net.bn", reason="its result is read by mul")


@pytest.mark.parametrize("name", ["plain", "augmented", "read again"])
def test_compiled_as_one_graph(name: str) -> None:
    torch.compiler.reset()
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


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="model is a list: expected"):
        sf.fuse([network()])
    with pytest.raises(TypeError, match=r"model is the class OwnNorm: .* as in OwnNorm\(\.\.\.\)"):
        sf.fuse(OwnNorm)
    with pytest.raises(ValueError, match="mode is 'fast': expected one of auto, eager, inductor"):
        sf.fuse(network(), mode="fast")
    with pytest.raises(TypeError, match=r"model is a DataParallel, .* DataParallel\(spikefuse"):
        sf.fuse(nn.DataParallel(network()))


def test_a_failed_capture_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise ValueError("no graphs today")

    monkeypatch.setattr(captured, "compile_graph", fail)
    net, x = network(), torch.randn(4, 3, 6)
    fused = sf.fuse(copy.deepcopy(net))
    assert torch.equal(fused(x), net(x))
    assert (
        "capture failed: backend='_backend' raised: ValueError: no graphs" in fused.fusion.summary
    )


class Indirect(nn.Module):
    """Refers to its norms in ways that `named_modules` does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(5))
        self.lif = lif()
        self.listed, self.named = [*self.norms], {"norm": (self.norms[1],)}
        self.bound = self.norms[2].forward
        self.partial = functools.partial(self.norms[3].forward)
        self.closure = lambda x, scale=1.0: scale * self.norms[4](x)

    def forward(self, x: Tensor) -> Tensor:
        y = self.named["norm"][0](self.listed[0](x.flatten(0, -2)))
        y = self.closure(self.partial(self.bound(y)))
        return self.lif(y.reshape(x.shape))


def plain() -> nn.Module:
    return Net(lambda n, x: n.lif(n.bn(n.first(x).flatten(0, -2)).reshape(x.shape)))


@pytest.mark.parametrize("is_temporal", [True, False])
@pytest.mark.parametrize("make", [plain, Indirect])
def test_modes_belong_to_each(make: Callable[[], nn.Module], is_temporal: bool) -> None:
    net, reference, x = make(), make(), torch.randn(4, 3, 6)
    reference.load_state_dict(net.state_dict())
    if is_temporal:
        net, reference = sf.Temporal(net), sf.Temporal(reference)
    fused = sf.fuse(net)
    fused.eval()
    assert all(module.training for module in net.modules())
    torch.testing.assert_close(fused(x), reference.eval()(x))
    torch.testing.assert_close(dict(fused.state_dict()), dict(reference.state_dict()))
    torch.testing.assert_close(net(x), reference.train()(x))
    torch.testing.assert_close(dict(net.state_dict()), dict(reference.state_dict()))


def test_hooks_belong_to_each() -> None:
    net, seen = network(), []
    net.net.bn.register_forward_hook(lambda *_: seen.append("before"))
    fused, x = sf.fuse(net), torch.randn(4, 3, 6)
    fused.net.bn.register_forward_hook(lambda *_: seen.append("after"))
    fused(x)
    assert seen == ["before", "after"]
    net(x)
    assert seen == ["before", "after", "before"]


def test_references_in_shared_containers_and_defaults() -> None:
    a, b, seen = nn.Linear(6, 6), nn.Linear(6, 6), []
    a.others = b.others = {"a": a, "b": b}
    a.register_forward_hook(lambda m, x, y, owner=b: seen.append(owner))
    fused = sf.fuse(sf.Temporal(nn.Sequential(a, b, lif())))
    a, b, _ = fused.net
    assert a.others["b"] is b.others["b"] is b
    assert b.others["a"] is a
    fused(torch.randn(4, 3, 6))
    assert seen == [b]


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_parametrized_and_scripted_modules() -> None:
    norm = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    net = sf.Temporal(nn.Sequential(norm, torch.jit.script(nn.Linear(6, 6)), lif()))
    fused, x = sf.fuse(net), torch.randn(4, 3, 6)
    torch.testing.assert_close(fused(x), net(x))
    assert all(p is q for p, q in zip(fused.parameters(), net.parameters(), strict=True))


def test_refused_attributes() -> None:
    net = nn.Sequential(nn.BatchNorm1d(6), sf.LIF())
    net.forward = lambda x: x
    with pytest.raises(TypeError, match="was assigned to the instance: fuse a mod"):
        sf.fuse(net)
    net = nn.Sequential(nn.BatchNorm1d(6), sf.LIF())
    net.fusion = nn.Identity()
    with pytest.raises(TypeError, match="where fuse stores its report"):
        sf.fuse(net)
    with pytest.raises(ValueError, match="lazy layers without values: call it once"):
        sf.fuse(sf.Temporal(nn.Sequential(nn.LazyLinear(6), sf.LIF())))


def test_hooks_of_state_dicts_get_the_copies() -> None:
    seen: list[nn.Module] = []
    net = network()
    net.net.bn.register_load_state_dict_pre_hook(lambda module, *_: seen.append(module))
    fused = sf.fuse(net)
    del net
    fused.load_state_dict(fused.state_dict())
    assert seen == [fused.net.bn]


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
        assert not fused.fusion.places


def test_states() -> None:
    net, x = network().eval(), torch.randn(6, 3, 6)
    del net.net.lif2
    fused = sf.fuse(net)
    expected, state = net(x[:2], return_state=True)
    y, fused_state = fused(x[:2], return_state=True)
    assert torch.equal(y, expected)
    assert state.keys() == fused_state.keys() == {"net.lif"}
    assert torch.equal(fused(x[2:], state=state), net(x[2:], state=fused_state))


def test_fused_twice() -> None:
    again = sf.fuse(sf.fuse(network()))
    again(torch.randn(4, 3, 6))
    assert again.fusion.fused == (Place("net.bn", "net.lif", True),)


def test_only_what_temporal_runs() -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), sf.LIF(), network())
    fused = sf.fuse(model)
    assert type(fused) is nn.Sequential
    assert fused[0].weight is model[0].weight
    assert fused[2].captured is not None
    assert model[2].captured is None
    fused[2](torch.randn(4, 3, 6))
    assert [p.norm for p in fused.fusion.fused] == ["2.net.bn"]


def test_a_network_of_sequences() -> None:
    """Without Temporal; names, hooks and copies are those of any module."""

    class Folds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn, self.lif = nn.BatchNorm1d(6), lif()

        def forward(self, x: Tensor) -> Tensor:
            return self.lif(self.bn(x.flatten(0, 1)).reshape(x.shape).contiguous())

    net, x = Folds(), torch.randn(4, 3, 6)
    fused = sf.fuse(net)
    assert type(fused) is Folds
    assert [*fused.state_dict()] == [*net.state_dict()]
    for model in (fused, copy.deepcopy(fused), copy.copy(fused)):
        model.eval()
        torch.testing.assert_close(model(x), net.eval()(x))
    seen: list[int] = []
    fused.register_forward_hook(lambda *_: seen.append(1))
    fused(x)
    assert seen == [1]
    assert fused.fusion.fused == (Place("bn", "lif"),)


def test_converted_models() -> None:
    plain, x = Net(lambda n, x: n.relu(n.bn(n.first(x)))), torch.randn(4, 3, 6)
    plain.relu = nn.ReLU()
    net = sf.Temporal(sf.spiking(plain, neuron=lif))
    fused = sf.fuse(net)
    torch.testing.assert_close(fused(x), net(x))
    assert Place("net.bn", "net.relu") in fused.fusion.fused


def test_graph_modules() -> None:
    """Whose class, of their own, has the code."""
    net = sf.from_ann(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), torch.rand(4, 6))
    x = torch.randn(4, 3, 6)
    torch.testing.assert_close(sf.fuse(net)(x), net(x))


def test_norms_outside_of_a_temporal() -> None:
    inside = sf.Temporal(nn.Sequential(nn.BatchNorm1d(3), sf.LIF()))
    outside = nn.Flatten(0, 1), nn.BatchNorm1d(3), nn.Unflatten(0, (4, 2)), sf.LIF()
    net = sf.fuse(nn.Sequential(inside, *outside))
    net(torch.rand(4, 2, 3))
    assert [place.norm for place in net.fusion.places] == ["0.net.0", "2"]
    assert net.fusion.left[-1].reason == "it is called outside Temporal"


def test_each_network_lists_its_own_modules() -> None:
    net, x = network(), torch.randn(4, 3, 6)
    fused = sf.fuse(net)
    known = net.listed.of(net.net)[0]
    for model in (fused, net, copy.deepcopy(net)):
        model(x)
        assert model.listed.of(model.net)[0][0] is model.net
    assert net.listed.of(net.net)[0] is known


WAYS = {
    "fused": sf.fuse,
    "segments": lambda net: sf.Temporal(net.net, memory=sf.memory.Checkpoint()),
    "compiled": functools.partial(torch.compile, backend="aot_eager"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.usefixtures("blocks_of_any_size")
def test_learned_widths(way: str, has_norm: bool) -> None:
    """Their kernels are made while PyTorch compiles."""

    class Own(sf.surrogate.Arctan):
        """Of no program that another test has made."""

    torch.compiler.reset()
    torch.manual_seed(0)
    width = nn.Parameter(torch.tensor(2.0))
    norm = nn.BatchNorm1d(8) if has_norm else nn.Identity()
    neuron = sf.LIF(0.7, 0.5, surrogate=Own(width))
    net = sf.Temporal(nn.Sequential(nn.Linear(6, 8), norm, neuron))
    x, found = torch.randn(7, 4, 6), []
    for run in (WAYS[way](net), functools.partial(net, impl="reference")):
        width.grad = None
        run(x).sum().backward()
        assert width.grad is not None
        found.append(width.grad)
    assert found[1].abs() > 1
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
