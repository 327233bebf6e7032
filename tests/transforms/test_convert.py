"""Conversion without other libraries; `tests/parity/test_convert.py` has the networks."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, fx, nn
from torch.optim.swa_utils import AveragedModel

import spikefuse as sf
from spikefuse.transforms.convert import convert
from tests.grid import on_grid, with_exact_layers
from tests.transforms.clock_driven import (
    LIFNode,
    MultiStepContainer,
    MultiStepLIFNode,
    SeqToANNContainer,
    clock_driven,
)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def network(**options) -> nn.Sequential:
    return nn.Sequential(
        SeqToANNContainer(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)),
        MultiStepLIFNode(v_threshold=0.5, **options),
        MultiStepContainer(nn.Flatten(), nn.Linear(144, 20), LIFNode(v_threshold=0.1)),
        nn.Linear(20, 20),
        nn.Flatten(2),
        MultiStepLIFNode(v_threshold=0.1),
    ).double()


def sequence() -> Tensor:
    return 3 * torch.randn(6, 2, 2, 8, 8, dtype=torch.float64)


@pytest.mark.parametrize("v_reset", [0.0, -0.2, None])
@pytest.mark.parametrize("decay_input", [True, False])
def test_spikingjelly_0_0_0_0_12(v_reset, decay_input):
    net, x = network(v_reset=v_reset, decay_input=decay_input), sequence()
    ours, expected = sf.convert(net), net(x)
    assert isinstance(ours[1], sf.LIF)
    assert 0.02 < expected.mean() < 0.98
    assert torch.equal(sf.Temporal(ours)(x, impl="reference"), expected)
    assert list(ours.state_dict()) == list(net.state_dict())


def test_compiled_fused_and_exportable():
    net = network().float()
    ours = sf.Temporal(sf.convert(net))
    x = sequence().float()
    expected = ours(x, impl="reference")
    assert torch.equal(ours(x), expected)
    fused = sf.fuse(ours)
    torch.testing.assert_close(fused(x).mean(), expected.mean(), atol=0.02, rtol=0)
    assert len(fused.fusion.fused) == 1
    exportable = sf.exportable(ours.eval())
    torch.testing.assert_close(exportable(x), ours(x))


def test_calls_outside_temporal_are_refused():
    net = nn.Sequential(nn.Linear(20, 20), LIFNode(v_threshold=0.1), nn.Linear(20, 3))
    ours, x = sf.convert(with_exact_layers(net)), on_grid((6, 2, 20))
    message = r"Sequential was converted for one time step .*outside Temporal.*Temporal\(net\)\(x\)"
    for step in (ours, copy.deepcopy(ours)):
        with pytest.raises(ValueError, match=message):
            step(x[0])
    expected = sf.Temporal(ours)(x)
    stream = sf.Stream(sf.Temporal(ours))
    torch.testing.assert_close(torch.stack([stream(step) for step in x]), expected)
    larger = sf.Temporal(nn.Sequential(ours, nn.Identity()), memory=sf.memory.Checkpoint())
    assert torch.equal(larger(x), expected)
    assert not net._forward_pre_hooks
    neuron = sf.convert(LIFNode())  # one neuron takes [T, B, ...]
    assert neuron(x).shape == x.shape


def test_recomputed_inside_temporal():
    class Recomputed(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x):
            return sf.checkpoint(self.net, x)

    layers = nn.Linear(20, 20), LIFNode(v_threshold=0.1), nn.Linear(20, 3)
    ours, x = sf.convert(nn.Sequential(*layers)), torch.randn(6, 2, 20)
    gradients = []
    for net in (ours, Recomputed(ours)):
        y = sf.Temporal(net)(x)
        gradients.append(torch.autograd.grad(y.square().sum(), [*ours.parameters()]))
    torch.testing.assert_close(gradients[0], gradients[1])


def test_memory_policies_recompute_converted_networks():
    ours, x = sf.convert(nn.Sequential(nn.Linear(20, 20), LIFNode())), torch.randn(6, 2, 20)
    sf.Temporal(ours, memory=sf.memory.Checkpoint())(x).sum().backward()


def test_copies_and_saved_files():
    net = network()
    ours, x = sf.convert(net), sequence()
    expected = sf.Temporal(ours)(x, impl="reference")
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for other in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        assert torch.equal(sf.Temporal(other)(x, impl="reference"), expected)
        assert str(other.conversion) == str(ours.conversion)


def test_table():
    ours = sf.convert(network(v_reset=-0.2))
    rows = {row.name: row for row in ours.conversion.rows}
    assert [*rows] == ["0", "1", "2", "2.2", "4", "5"]
    assert rows["1"].after.startswith("LIF(")
    assert rows["1"].note == "its potential is counted from v_reset = -0.2"
    assert rows["4"].note == "dims of one step"
    head, *lines = str(ours.conversion).splitlines()
    assert head.split() == ["module", "was", "is", "note"]
    assert len(lines) == len(rows)


def test_the_original_is_unchanged():
    net = network()
    before = [(name, type(module), module.training) for name, module in net.named_modules()]
    ours = sf.convert(net)
    assert [(n, type(m), m.training) for n, m in net.named_modules()] == before
    assert not any(module.training for module in sf.convert(net.eval()).modules())
    assert ours[0] is not net[0]
    assert ours[0][0].weight is net[0][0].weight


class OneStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.lif = nn.Linear(5, 5), LIFNode()

    def forward(self, x):
        return self.lif(self.fc(x))


class LastStep(nn.Module):
    """Written for sequences: its index counts time steps from the last."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.lif = nn.Linear(4, 12), MultiStepLIFNode(v_threshold=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.lif(self.fc(x))[-1]


class LastFeatures(LastStep):
    """Runs on one step, too: it counts dims from the last."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.lif(self.fc(x))
        return y / y.shape[-1] + y.size()[-1]


def test_the_last_step_and_the_last_dim():
    net, x = LastStep(), torch.randn(6, 2, 4)
    ours, expected = sf.convert(net), net(x)
    assert 0 < expected.mean() < 1
    torch.testing.assert_close(ours(x), expected)
    assert "[-1]` counts dims of [T, B, ...]" in str(ours.conversion)
    net = LastFeatures()
    torch.testing.assert_close(sf.Temporal(sf.convert(net))(x), net(x))


def test_hooks_on_neurons_are_refused():
    net = OneStep()
    net.lif.register_forward_hook(print)
    with pytest.raises(ValueError, match=r"'lif' \(spikingjelly.LIFNode\): it has hooks"):
        sf.convert(net)


def test_code_without_a_source_is_refused():
    scope: dict = {"nn": nn, "OneStep": OneStep}
    exec("class Typed(OneStep):\n    def forward(self, x):\n        return self.lif(x)", scope)
    with pytest.raises(ValueError, match=r"Typed\.forward: its source can't be read"):
        sf.convert(scope["Typed"]())


@pytest.mark.parametrize(
    "stages",
    [[nn.Sequential(nn.Linear(5, 5), LIFNode())], [[LIFNode()]], {"first": (LIFNode(),)}],
    ids=["list of modules", "list of lists", "dict of tuples"],
)
def test_neurons_inside_values_of_a_plain_container_are_refused(stages):
    net = OneStep()
    net.stages = stages
    with pytest.raises(ValueError, match=r"it keeps modules in stages, .* use nn\.ModuleList"):
        sf.convert(net)


def test_recurrent_layers_of_torch_are_refused():
    with pytest.raises(ValueError, match=r"'1' \(GRU\): it has a memory of its own"):
        sf.convert(nn.Sequential(OneStep(), nn.GRU(5, 5)))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Flatten(), r"'0' \(Flatten\): it flattens time or batch: use start_dim=2"),
        (nn.BatchNorm1d(20), r"'0' \(BatchNorm1d\): it takes \[B, ...\], and here it gets"),
        (nn.Softmax(2), r"'0' \(Softmax\): it takes"),
    ],
)
def test_layers_of_torch_that_count_dims(layer, message):
    with pytest.raises(ValueError, match=message):
        sf.convert(nn.Sequential(layer, MultiStepLIFNode()))
    sf.convert(nn.Sequential(nn.Softmax(-1), nn.LayerNorm(20), nn.ReLU(), MultiStepLIFNode()))


def test_extra_must_make_modules():
    with pytest.raises(
        ValueError, match=r"'lif' .*: extra returned a int: expected a torch\.nn\.Mod"
    ):
        sf.convert(OneStep(), extra={LIFNode: lambda module: 3})  # type: ignore[dict-item]


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"model is a str: expected a torch\.nn\.Module"):
        sf.convert("net")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has a Temporal in it"):
        sf.convert(sf.Temporal(OneStep()))
    with pytest.raises(ValueError, match="Linear has no module of SpikingJelly, snnTorch or Norse"):
        sf.convert(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"Sequential has no module of SpikingJelly"):
        sf.convert(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert convert is sf.convert


class Wrapper(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Leaves(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, LIFNode) or super().is_leaf_module(m, module_qualified_name)


def graph_of(net: nn.Module) -> fx.GraphModule:
    return fx.GraphModule(net, Leaves().trace(net))


@pytest.mark.parametrize("place", [lambda net: net, Wrapper], ids=["alone", "inside"])
@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        AveragedModel,
        lambda net: torch.compile(net, backend="eager"),
        graph_of,
        lambda net: nn.DataParallel(AveragedModel(net)),
    ],
    ids=["DataParallel", "AveragedModel", "compile", "GraphModule", "two"],
)
def test_wrappers_of_torch(wrap, place):
    layers = nn.Linear(20, 20), LIFNode(v_threshold=0.1), nn.Linear(20, 3)
    net, x = with_exact_layers(nn.Sequential(*layers)), on_grid((6, 2, 20))
    original = place(wrap(net))
    expected = torch.stack([net(step) for step in x])
    before = list(original.modules())
    ours = sf.convert(original)
    assert not any(isinstance(module, LIFNode) for module in ours.modules())
    assert torch.equal(sf.Temporal(ours)(x), expected)
    assert list(original.modules()) == before
    assert not any(module._forward_pre_hooks for module in before)
    with pytest.raises(ValueError, match="is called outside Temporal"):
        ours(x[0])


def test_a_graph_of_sequences():
    net, x = LastStep(), torch.randn(6, 2, 4)
    ours, expected = sf.convert(graph_of(net)), net(x)
    torch.testing.assert_close(ours(x), expected)
    assert "without Temporal: its graph calls" in str(ours.conversion)


def test_modules_compiled_in_place():
    net, x = network().float(), sequence().float()
    expected = sf.Temporal(sf.convert(net))(x, impl="reference")
    net[0].compile(backend="eager")  # it would fold time a second time
    assert torch.equal(sf.Temporal(sf.convert(net))(x, impl="reference"), expected)


class EitherWay(OneStep):
    """Its neuron runs once in each branch, and a variable has the name of a module outside."""

    def forward(self, x):
        steps = [self.fc]
        for shared in steps:
            x = shared(x)
        return self.lif(2 * x) if self.training else self.lif(x)


shared = LIFNode()


class AfterABranch(OneStep):
    def forward(self, x):
        if self.training:
            x = self.lif(x)
        return self.lif(x)


def test_branches():
    ours = sf.convert(EitherWay())
    assert isinstance(ours.lif, sf.LIF)
    with pytest.raises(ValueError, match=r"`self.lif\(x\)` runs its neurons a second time"):
        sf.convert(AfterABranch())


class TwoSteps(OneStep):
    def forward(self, x):
        return self.lif(self.lif(self.fc(x)))


def test_a_neuron_that_is_left_is_refused():
    @clock_driven("neuron")
    class MemoryModule(nn.Module):
        pass

    for kind in (nn.Sequential, lambda module: nn.Sequential(MemoryModule())):
        with pytest.raises(ValueError, match=r"'lif.0' \(spikingjelly\..*\): it is left in the"):
            sf.convert(OneStep(), extra={LIFNode: kind})


def test_wrappers_that_are_refused():
    with pytest.raises(ValueError, match=r"GraphModule.*: its graph calls 'lif' 2 times"):
        sf.convert(graph_of(TwoSteps()))
    # A graph that contains the operators of its neurons, not the modules.
    with pytest.raises(ValueError, match="GraphModule has no module of SpikingJelly"):
        sf.convert(fx.GraphModule(nn.Module(), fx.Graph()))


@clock_driven("surrogate")
class PiecewiseExp(nn.Module):
    """A surrogate without an equivalent here, whose derivative works in place."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, alpha):
            ctx.save_for_backward(x)
            ctx.alpha = alpha
            return (x >= 0).to(x)

        @staticmethod
        def backward(ctx, grad):
            slope = ctx.alpha / 2 * (-ctx.alpha * ctx.saved_tensors[0].abs()).exp_()
            return slope * grad, None

    def __init__(self, alpha=1.5):
        super().__init__()
        self.alpha, self.spiking = alpha, True

    @staticmethod
    def spiking_function(x, alpha):
        return PiecewiseExp.Function.apply(x, alpha)

    def forward(self, x):
        return self.spiking_function(x, self.alpha)


class Indexed(PiecewiseExp):
    @staticmethod
    def spiking_function(x, alpha):
        return x[x >= 0]


class Unit(PiecewiseExp.Function):
    """Takes the potential alone."""

    @staticmethod
    def forward(ctx, x):
        return PiecewiseExp.Function.forward(ctx, x, 1.5)

    @staticmethod
    def backward(ctx, grad):
        return PiecewiseExp.Function.backward(ctx, grad)[0]


class Clipped(Unit):
    @staticmethod
    def backward(ctx, grad):
        return Unit.backward(ctx, grad).clamp(-0.3, 0.3)


@pytest.mark.parametrize(
    "function",
    [PiecewiseExp(), Unit.apply, lambda u: PiecewiseExp.Function.apply(u, 1.5)],
    ids=["class", "apply", "function"],
)
def test_a_surrogate_that_compiles(backends, function):
    node = LIFNode()
    del node.surrogate_function
    node.surrogate_function = function
    x = 2 * torch.rand(6, 3, 5, device=backends.device)
    theirs, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = torch.stack([node(step) for step in theirs])
    y = sf.Temporal(convert(node))(ours)
    assert torch.equal(y, expected)
    for a in (y, expected):
        (a * x).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_surrogate_that_does_not_compile():
    node = LIFNode()
    node.surrogate_function = Indexed()
    with pytest.raises(ValueError, match=r"Indexed can't be compiled \(.*test_convert.py, line"):
        convert(node)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (Clipped.apply, r"Clipped\.apply .*its backward does not multiply the gradient by a func"),
        (lambda u: (u >= 0).to(u), r"<lambda> can't be compiled \(it has no derivative\): use"),
        (nn.Sigmoid(), r"Sigmoid .*\(it is no function, and has no static spiking_function\): use"),
    ],
    ids=["clipped", "constant", "module"],
)
def test_functions_that_are_no_surrogates(function, message):
    node = LIFNode()
    del node.surrogate_function
    node.surrogate_function = function
    with pytest.raises(ValueError, match=message):
        convert(node)


class Auxiliary(nn.Module):
    """Calls a head in one round of a loop over layers."""

    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Sequential(nn.Linear(4, 4), LIFNode())

    def forward(self, x):
        for i in range(3):
            x = self.cells[i](x)
            if i == 1:
                side = self.head(x)
        return x + side


class Repeated(Auxiliary):
    def forward(self, x):
        for i in range(3):
            if i != 1:
                x = self.head(x)
        return x


class Renamed(Auxiliary):
    """Its code names the module otherwise."""

    def forward(net, x):  # noqa: N805
        return net.head(net.head(x))


class RenamedLoop(Auxiliary):
    def forward(net, x):  # noqa: N805
        y = net.head(x)
        for _ in range(3):
            y = y + net.head(x)
        return y


def test_code_that_names_the_module_otherwise():
    with pytest.raises(ValueError, match=r"`net.head\(x\)` runs its neurons a second time"):
        convert(Renamed())
    with pytest.raises(ValueError, match=r"calls `net.head` several times, a loop over time"):
        convert(RenamedLoop())


def test_a_layer_that_a_loop_calls_once():
    net, x = Auxiliary(), torch.rand(4, 2, 4)
    expected = torch.stack([net(step) for step in x])
    torch.testing.assert_close(sf.Temporal(convert(net))(x), expected)
    with pytest.raises(ValueError, match=r"calls `self.head` several times, a loop over time"):
        convert(Repeated())
