"""What `fuse` replaces, and what the fused network shares with the original."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf
from spikefuse.graph.report import Place
from spikefuse.models import MODELS, resnet18
from spikefuse.nn.encode import direct
from tests.graph.norm_networks import FUSED, Net, compare, lif, network, results
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


def test_converted_models() -> None:
    plain, x = Net(lambda n, x: n.relu(n.bn(n.first(x)))), torch.randn(4, 3, 6)
    plain.relu = nn.ReLU()
    net = sf.Temporal(sf.spiking(plain, neuron=lif))
    fused = sf.fuse(net)
    torch.testing.assert_close(fused(x), net(x))
    assert Place("net.bn", "net.relu") in fused.fusion.fused
