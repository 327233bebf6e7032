"""Networks that run as captured graphs: when they are captured anew, and when they are not."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator

import lightning
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import spikefuse as sf
from spikefuse.graph import backend, captured
from spikefuse.graph.report import Place
from tests.graph.norm_networks import FUSED, Net, compare, lif, network, results
from tests.processes import free_port

FUSED_PLACE = Place("net.bn", "net.lif", True)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.Graph]:
    """The graphs that are captured during the test."""
    found: list[torch.fx.Graph] = []
    compile_graph = captured.compile_graph

    def recording(gm: torch.fx.GraphModule, *args: object) -> backend.Graph:
        found.append(gm.graph)
        return compile_graph(gm, *args)

    monkeypatch.setattr(captured, "compile_graph", recording)
    return found


def notes(fused: nn.Module) -> list[str]:
    return [note for report in fused.fusion.reports for note in report.notes]


def steps(net: nn.Module, x: Tensor, count: int = 3) -> list[Tensor]:
    """The outputs of some training steps."""
    optimizer, outputs = torch.optim.SGD(net.parameters(), 0.1), []
    for _ in range(count):
        y = net(x)
        (y * torch.arange(float(y.numel())).view(y.shape).cos()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(y.detach())
    return outputs


# What is captured anew


def test_modes_and_shapes_are_captured_once(graphs: list[torch.fx.Graph]) -> None:
    net, fused = network(), sf.fuse(network())
    x = torch.randn(4, 3, 6)

    def calls() -> Iterator[tuple[Tensor, Tensor]]:
        for model in (net, fused):
            model.train()
        yield net(x), fused(x)
        yield net(x[:, :2]), fused(x[:, :2])
        with torch.autocast("cpu", torch.bfloat16):
            yield net(x), fused(x)
        for model in (net, fused):
            model.eval()
        yield net(x), fused(x)
        with torch.no_grad():
            yield net(x), fused(x)
        with torch.inference_mode():
            yield net(x), fused(x)

    for expected, actual in calls():
        torch.testing.assert_close(actual, expected)
    before = len(graphs)
    for expected, actual in calls():
        torch.testing.assert_close(actual, expected)
    assert len(graphs) == before
    assert not notes(fused)


def test_settings_that_are_assigned() -> None:
    net = network().eval()
    fused, x, found = sf.fuse(net), torch.randn(4, 3, 6), []
    norm = nn.BatchNorm1d(6, affine=False).eval()
    for change in (
        lambda n: None,
        lambda n: setattr(n.lif, "decay", 0.25),
        lambda n: setattr(n.lif, "reset", "soft"),
        lambda n: setattr(n.bn, "eps", 0.5),
        lambda n: setattr(n, "function", FUSED["plain"][0]),
        lambda n: setattr(n, "bn", norm),
    ):
        change(net.net)
        change(fused.net)
        found.append(fused(x))
        assert torch.equal(found[-1], net(x))
    assert len({tuple(y.flatten().tolist()) for y in found}) > 3


def test_one_neuron_and_fifty() -> None:
    """An assignment to a neuron that is not in the network captures nothing."""
    net, other = sf.fuse(network()), sf.LIF()
    x = torch.randn(4, 3, 6)
    net(x)
    net.captured._backend = None  # type: ignore[method-assign]
    other.decay = 0.1
    net(x)


def test_hooks_that_come_and_go() -> None:
    net, x, seen = sf.fuse(network()), torch.randn(4, 3, 6), []
    net(x)
    for module in (net, net.net, net.net.bn, net.net.lif):
        hook = module.register_forward_hook(lambda m, args, y: seen.append(type(m)))
        net(x)
        hook.remove()
        net(x)
        pre_hook = module.register_forward_pre_hook(lambda m, args: seen.append(type(m)))
        net(x)
        pre_hook.remove()
    assert seen == [kind for kind in (sf.Temporal, Net, nn.BatchNorm1d, sf.LIF) for _ in range(2)]


def test_hooks_that_are_always_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs do not accumulate, and calls without a hook remain fused."""
    monkeypatch.setattr(captured, "MAX_CAPTURED", 2)
    net, x, seen = sf.fuse(network()).eval(), torch.randn(4, 3, 6), []
    for i in range(4):
        hook = net.net.lif.register_forward_hook(lambda m, args, y: seen.append(y))
        y = net(x)
        hook.remove()
        torch.testing.assert_close(y, net(x))
        assert len(seen) == i + 1
    assert len(net.captured._compiled) == 2
    assert notes(net) == ["too many different hooks: the last call was not captured"]
    assert net.fusion.fused == (FUSED_PLACE,)


def test_hooks_of_all_modules() -> None:
    net, x, seen = sf.fuse(network()), torch.randn(4, 3, 6), []
    net(x)
    hook = register_module_forward_hook(lambda m, args, y: seen.append(type(m)))
    try:
        net(x)
    finally:
        hook.remove()
    assert {nn.Linear, nn.BatchNorm1d, sf.LIF, Net, sf.Temporal} <= {*seen}


def test_hooks_that_change_results() -> None:
    net, x = network().eval(), torch.randn(4, 3, 6)
    fused = sf.fuse(net)
    fused(x)
    for model in (net, fused):
        model.net.bn.register_forward_hook(lambda m, args, y: 2 * y)
    assert torch.equal(fused(x), net(x))


def test_backward_hooks_run_without_graphs() -> None:
    net, x, seen = sf.fuse(network()), torch.randn(4, 3, 6), []
    hook = net.net.bn.register_full_backward_hook(lambda *_: seen.append(1))
    net(x).sum().backward()
    assert seen == [1]
    assert notes(net) == ["not captured: there are backward hooks, or hooks of all modules"]
    hook.remove()
    net(x)
    assert net.fusion.fused == (FUSED_PLACE,)
    assert not notes(net)


# What is captured in part, or not at all


class Uncompiled(nn.Module):
    """A layer that TorchDynamo leaves to Python."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize("layer", ["first", "bn", "lif"])
def test_more_than_one_graph(layer: str) -> None:
    net = Net(lambda n, x: n.lif2(n.other(n.lif(n.bn(n.first(x))))))
    setattr(net, layer, Uncompiled(getattr(net, layer)))
    fused = compare(sf.Temporal(net), torch.randn(4, 3, 6))
    assert Place("net.other", "net.lif2") in fused.fusion.fused
    assert f", in {2 + (layer != 'first')} graphs" in fused.fusion.summary


class Modes(nn.Module):
    """Uses its part both directly and compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.BatchNorm1d(6), lif())
        self.compiled = torch.compile(self.part, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) if self.training else self.compiled(x)


def test_compiled_layers_inside() -> None:
    seen: list[int] = []
    layers = nn.Sequential(nn.BatchNorm1d(6), lif(), nn.Linear(6, 6))
    layers[0].register_forward_hook(lambda *_: seen.append(1))
    net = sf.Temporal(nn.Sequential(torch.compile(layers, backend="eager"), Modes()))
    fused, x = sf.fuse(net), torch.randn(4, 3, 6)
    for training in (True, False):
        torch.testing.assert_close(fused.train(training)(x), net.train(training)(x))
    assert len(seen) == 4


def test_function_transforms_are_not_captured() -> None:
    net = sf.fuse(sf.Temporal(nn.Sequential(nn.Linear(6, 8), sf.LIF(), nn.Linear(8, 3))))
    x, params = torch.rand(5, 4, 6), {n: p.detach() for n, p in net.named_parameters()}
    for kwargs in ({}, {"impl": "reference"}):

        def loss(params, x):
            return torch.func.functional_call(net, params, (x,), kwargs).sum()  # noqa: B023

        if kwargs:
            assert torch.func.grad(loss)(params, x)["net.0.weight"].any()
        else:
            with pytest.raises(NotImplementedError, match="kernels take no part"):
                torch.func.grad(loss)(params, x)
    assert net.captured.report.graphs == 0
    assert net.captured.report.notes == []


def test_compiled_containers_are_left_alone() -> None:
    compiled = torch.compile(network(), backend="eager")
    with pytest.raises(TypeError, match="compiled already: fuse the network first"):
        sf.fuse(compiled)
    both = nn.ModuleList([compiled, network()])
    fused, x = sf.fuse(both), torch.randn(4, 3, 6)
    assert fused[0].captured is None
    torch.testing.assert_close(fused[0](x), compiled(x))
    fused[1](x)
    (place,) = fused.fusion.fused
    assert place.norm == "1.net.bn"


def test_a_backend_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise KeyError("a defect")

    net, fused = network(), sf.fuse(network())
    x = torch.randn(4, 3, 6)
    with monkeypatch.context() as patch:
        patch.setattr(captured, "compile_graph", fails)
        for _ in range(2):
            torch.testing.assert_close(fused(x), net(x))
    (note,) = notes(fused)
    assert note.startswith("capture failed: ")
    assert note.endswith("KeyError: 'a defect'")
    assert fused.fusion.summary.endswith(note)
    for a, b in zip(fused.buffers(), net.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    assert sf.fuse(fused)(x).shape == x.shape  # captures anew


def test_errors_of_the_network_are_its_own() -> None:
    """A wrong call changes nothing for later ones."""
    net = sf.fuse(network())
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        net(torch.randn(4, 3, 5))
    with pytest.raises(TypeError, match=r"expected float32, bfloat16 or float16"):
        sf.fuse(sf.Temporal(nn.Sequential(nn.Identity(), sf.LIF())))(torch.zeros(4, 3, 6).double())
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        net(torch.randn(1, 1, 6))
    net(torch.randn(4, 3, 6))
    assert net.fusion.fused == (FUSED_PLACE,)
    assert not notes(net)


def test_more_variants_than_graphs_of_a_function(graphs: list[torch.fx.Graph]) -> None:
    """TorchDynamo runs at most eight graphs of a function, and plain Python after that."""
    fused, x = sf.fuse(network()), torch.randn(4, 3, 6)
    net = fused.net
    for i in range(12):
        net.scale_by = f"{i}"  # a constant of the graph
        net.function = lambda n, x: len(n.scale_by) * n.lif(n.bn(n.first(x)))
        fused(x)
    assert len(graphs) >= 11
    assert not notes(fused)


def test_two_networks_do_not_share_a_limit(graphs: list[torch.fx.Graph]) -> None:
    x = torch.randn(4, 3, 6)
    for _ in range(10):
        fused = sf.fuse(network())
        fused(x)
        assert fused.fusion.fused == (FUSED_PLACE,)
    assert len(graphs) == 10


# Copies, dtypes and wrappers


def test_copies_capture_their_own_network() -> None:
    fused, x = sf.fuse(network()), torch.randn(4, 3, 6)
    fused(x)
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        before = fused.net.bn.running_mean.clone()
        other(x)
        assert torch.equal(fused.net.bn.running_mean, before)
        assert other.fusion.fused == (FUSED_PLACE,)
        nn.init.zeros_(other.net.bn.weight)
        assert not torch.equal(other.eval()(x), copy.deepcopy(fused).eval()(x))


def test_a_copy_of_a_compiled_network_has_its_own_weights() -> None:
    net = network().eval()
    net.compile(backend="eager")
    x = torch.randn(4, 3, 6)
    net(x)
    other = copy.deepcopy(net)
    nn.init.constant_(other.net.bn.bias, 9.0)
    assert not torch.equal(other(x), net(x))


def test_averaged_model() -> None:
    net, x = sf.fuse(network()), torch.randn(4, 3, 6)
    averaged = AveragedModel(net)
    for _ in range(2):
        steps(net, x, 1)
        averaged.update_parameters(net)
    y = averaged.eval()(x)
    expected = network().eval()
    expected.load_state_dict(averaged.module.state_dict())
    torch.testing.assert_close(y, expected(x))
    assert averaged.module.fusion.fused == (FUSED_PLACE,)


def test_another_dtype() -> None:
    net, fused = network(), sf.fuse(network())
    x = torch.randn(4, 3, 6)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        y = fused.to(dtype)(x.to(dtype))
        assert y.dtype is dtype
        torch.testing.assert_close(y, net.to(dtype)(x.to(dtype)), rtol=0.1, atol=0.1)
        assert fused.fusion.fused == (FUSED_PLACE,)


@pytest.mark.filterwarnings("ignore::UserWarning:torch.utils.checkpoint")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_of_torch(use_reentrant: bool) -> None:
    """Of layers and of neurons: random numbers are those of the first run, and norms count once."""

    def forward(n: Net, x: Tensor) -> Tensor:
        part = lambda y: n.lif(n.same(n.bn(n.first(y))))  # noqa: E731
        return checkpoint(part, x, use_reentrant=use_reentrant) + n.lif2(n.same(x))

    net, x = Net(forward), torch.randn(4, 3, 6)
    net.same = nn.Dropout(0.5)
    plain = copy.deepcopy(net)
    plain.function = lambda n, x: n.lif(n.same(n.bn(n.first(x)))) + n.lif2(n.same(x))
    expected, actual = (results(m, x) for m in (sf.Temporal(plain), sf.fuse(sf.Temporal(net))))
    for name, value in expected.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-4, msg=name)


def test_fabric() -> None:
    """A module that Fabric has set up can be fused, and a fused one set up."""
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    x = torch.randn(4, 3, 6)
    expected = steps(network(), x)
    net = network()
    wrapped = fabric.setup_module(net)
    for model in (sf.fuse(wrapped), fabric.setup_module(sf.fuse(network()))):
        torch.testing.assert_close(steps(model, x), expected, rtol=1e-4, atol=1e-4)
        (place,) = places(model)
        assert place.neuron.endswith("net.lif")
    # The original, which shares parameters, runs as before.
    assert wrapped.module is net
    assert torch.equal(wrapped.eval()(x), net.eval()(x))


def places(model: nn.Module) -> tuple[Place, ...]:
    fused = next(m for m in model.modules() if "fusion" in vars(m))
    return fused.fusion.fused


@pytest.fixture
def process_group() -> Iterator[None]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    dist.init_process_group("gloo", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Wide(nn.Module):
    """Layers whose gradients DistributedDataParallel sends in several buckets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [(nn.Linear(520, 520), nn.BatchNorm1d(520), sf.LIF(0.5, 0.3)) for _ in range(3)]
        self.layers = nn.Sequential(*(layer for block in layers for layer in block))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("bucket_cap_mb", [1, 0.1])
def test_distributed_data_parallel(bucket_cap_mb: float, process_group: None) -> None:
    """TorchDynamo would split graphs at the buckets of gradients."""
    x = torch.randn(4, 3, 520)
    expected, fused = steps(sf.Temporal(Wide()), x), sf.fuse(sf.Temporal(Wide()))
    model = DistributedDataParallel(fused, bucket_cap_mb=bucket_cap_mb)
    torch.testing.assert_close(steps(model, x), expected)
    assert len(fused.fusion.fused) == 3
    assert fused.fusion.summary == "3 of 3 batch norms fused with the neuron after them"
    assert torch._dynamo.config.optimize_ddp


# It warns of views, which the outputs of Temporal are.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_fully_shard(process_group: None) -> None:
    x = torch.randn(4, 3, 6)
    net = lambda: sf.Temporal(Net(FUSED["plain"][0]).requires_grad_(True))  # noqa: E731
    expected = steps(net(), x)
    whole, by_layer = sf.fuse(net()), sf.fuse(net())
    fully_shard(by_layer.net.first)
    for model in (whole, by_layer):
        fully_shard(model)
        torch.testing.assert_close(steps(model, x), expected, rtol=1e-4, atol=1e-4)
        assert model.fusion.fused == (Place("net.bn", "net.lif"),)
    with pytest.raises(TypeError, match=r"by fully_shard, .*: fuse the network first"):
        sf.fuse(whole)
