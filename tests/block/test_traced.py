"""Fused networks inside torch.compile: blocks in the graph, and results of the eager network."""

import copy
from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import spikefuse as sf
from spikefuse.block import fused_norm, library
from spikefuse.models import spikformer
from spikefuse.scan.op import Request
from spikefuse.testing import make_input


@pytest.fixture(autouse=True)
def reset():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Residual(nn.Module):
    """Norms before a neuron, in an addition with another norm, and before a ReLU."""

    def __init__(self):
        super().__init__()
        self.c1, self.c2 = (nn.Conv2d(c, 4, 3, padding=1, bias=False) for c in (3, 4))
        self.down = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4))
        self.n1, self.n2, self.n3 = (nn.BatchNorm2d(4, affine=i != 0) for i in range(3))
        self.l1, self.l2 = sf.LIF(0.5, 0.5), sf.PLIF(0.5, threshold=0.5)

    def forward(self, x):
        y = self.l1(self.n1(self.c1(x)))
        y = self.l2(self.down(x) + self.n2(self.c2(y)))
        return y + torch.relu(self.n3(y))


class Wrapped(nn.Module):
    """A network of one norm and one neuron, with a function between them."""

    def __init__(self, function, norm=None):
        super().__init__()
        self.norm = nn.BatchNorm1d(6) if norm is None else norm
        self.neuron, self.other, self.function = sf.LIF(0.5, 0.5), sf.ALIF(), function

    def forward(self, x):
        return self.function(self, x)


class OwnNorm(nn.BatchNorm1d):
    """A norm that stays plain."""


class Graphs:
    """A backend that keeps what AOTAutograd makes of the graphs."""

    def __init__(self):
        self.forward, self.backward = [], []

    def __call__(self, graph, inputs):
        compilers = (self._keeping(graphs) for graphs in (self.forward, self.backward))
        forward, backward = compilers
        compiled = aot_autograd(fw_compiler=forward, bw_compiler=backward)
        return compiled(graph, inputs)

    def _keeping(self, graphs):
        def compiler(graph, inputs):
            graphs.append([str(node.target) for node in graph.graph.nodes])
            return make_boxed_func(graph.forward)

        return compiler


def check(net, inputs, graphs=None, tolerance=None, **options):
    """Compare training steps, running statistics and evaluation with those of the eager network."""
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    torch.manual_seed(0)
    eager = sf.fuse(sf.Temporal(net))
    compiled_net = sf.fuse(sf.Temporal(copy.deepcopy(net)))
    options = {"fullgraph": True, "backend": graphs or "aot_eager", **options}
    compiled = torch.compile(compiled_net, **options)
    for x in inputs:
        expected, actual = eager(x), compiled(x)
        close(actual, expected)
        grad = torch.randn_like(expected)
        for network, y in ((eager, expected), (compiled_net, actual)):
            network.zero_grad()
            y.backward(grad)
        for p, q in zip(eager.parameters(), compiled_net.parameters(), strict=True):
            close(q.grad, p.grad)
        for (name, p), q in zip(eager.named_buffers(), compiled_net.buffers(), strict=True):
            close(q, p, msg=name)
    eager.eval()
    compiled_net.eval()
    with torch.no_grad():
        close(compiled(inputs[-1]), eager(inputs[-1]))
    return eager


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_residual_network(layout):
    graphs = Graphs()
    inputs = [
        torch.randn(4 * b, 3, 6, 6).to(memory_format=layout).unflatten(0, (4, b)) for b in (2, 3, 5)
    ]
    eager = check(Residual(), inputs, graphs)
    assert len(eager.fusion.fused) == 3
    *steps, evaluation = graphs.forward
    assert len(steps) <= 3  # of three batch sizes
    for training in steps:
        assert training.count("spikefuse.block.default") == 2
        # Two are in one block. The last is read by a ReLU.
        assert training.count("spikefuse.norm_statistics.default") == 3
        assert sum("native_batch_norm" in target for target in training) == 1
    assert evaluation.count("spikefuse.scan.default") == 2
    assert graphs.backward[0].count("spikefuse.block_backward.default") == 2


def norm_without_gradients(net, x):
    with torch.no_grad():
        y = net.norm(x)
    return net.neuron(y) + 0 * net.norm.weight


@pytest.mark.parametrize(
    ("function", "blocks"),
    [
        (norm_without_gradients, 0),
        (lambda net, x: net.neuron(net.norm(x)), 1),
        (lambda net, x: net.neuron(net.norm(x) + x), 1),
        (lambda net, x: net.neuron(x + net.norm(x)), 1),
        (lambda net, x: net.neuron(torch.add(net.norm(x), x, alpha=2.0)), 0),
        (lambda net, x: net.neuron(net.norm(x) + 1.0), 0),
        (lambda net, x: net.neuron(net.norm(x) + x.mean(0, keepdim=True)), 0),
        (lambda net, x: net.neuron(net.norm(x) + x + x), 0),
        (lambda net, x: net.neuron(net.norm(x).relu_()), 0),
        (lambda net, x: net.neuron(net.norm(x).add_(x)), 0),
        (lambda net, x: net.neuron(torch.nn.functional.relu(net.norm(x), inplace=True)), 0),
        (lambda net, x: net.neuron(net.norm(x).unflatten(1, (2, 3)).flatten(1)), 0),
        (lambda net, x: (lambda y: net.neuron(y) + y)(net.norm(x)), 1),
        (lambda net, x: (lambda y: net.neuron(y) + net.other(y))(net.norm(x)), 1),
        (lambda net, x: (lambda y: y.relu_() + net.neuron(y))(net.norm(x)), 0),
        (lambda net, x: net.norm(x).sum(-1, keepdim=True) + net.neuron(x), 0),
        (lambda net, x: net.neuron(net.norm(net.norm(x))), 1),
        # Both update running statistics in place.
        (lambda net, x: net.neuron(net.norm(x) + net.later(net.later_norm(x))), 2),
        (lambda net, x: net.neuron(net.norm(x) + net.plain(x)), 1),
    ],
)
def test_what_becomes_a_block(function, blocks):
    graphs, net = Graphs(), Wrapped(function)
    net.later, net.later_norm, net.plain = sf.LIF(), nn.BatchNorm1d(6), OwnNorm(6)
    check(net, [torch.randn(5, 4, 6)] * 2, graphs)
    assert graphs.forward[0].count("spikefuse.block.default") == blocks


def changed(change, dtype=torch.float32, read=lambda h: h):
    """A network that changes something between a norm, with a residual, and the neuron."""

    def function(net, x):
        h, residual = x.to(dtype) + 1, x.to(dtype) - 1
        total = net.norm(read(h)) + residual
        change(net, h, residual)
        return net.neuron(total)

    return function


@pytest.mark.parametrize(
    "function",
    [
        changed(lambda net, h, residual: residual.mul_(2)),
        changed(lambda net, h, residual: residual[:, :3].mul_(-2)),
        changed(lambda net, h, residual: h.mul_(-2)),
        changed(lambda net, h, residual: h[:, :3].mul_(-2)),
        changed(lambda net, h, residual: h.detach().mul_(-2)),
        changed(lambda net, h, residual: h.mul_(-2), read=lambda h: h.view(20, 6)),
        changed(lambda net, h, residual: h[:, :3].mul_(-2), torch.bfloat16),
        changed(lambda net, h, residual: net.norm.bias.add_(1)),
        lambda net, x: net.neuron(net.norm(x).add_(x)),
        lambda net, x: (lambda h: net.neuron((net.norm(h), h.mul_(-2))[0]))(x + 1),
    ],
)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("part", ["whole", "inside Temporal"])
def test_what_changes_between_norm_and_neuron(function, training, part):
    """The eager network raises an error."""
    net = Wrapped(function).train(training)
    expected = sf.Temporal(copy.deepcopy(net))
    compiled = sf.fuse(sf.Temporal(net))
    owner = compiled.net if part == "inside Temporal" else compiled
    owner.compile(fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 4, 6)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), expected(x))
    for buffer, wanted in zip(net.buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(buffer, wanted)


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(6, momentum=0.3, eps=0.1),
        nn.BatchNorm1d(6, track_running_stats=False),
        nn.SyncBatchNorm(6),
    ],
)
def test_settings_of_norms(norm):
    if isinstance(norm, nn.SyncBatchNorm):  # refuses CPU tensors, alone
        norm.eval()
        net = sf.fuse(sf.Temporal(Wrapped(lambda net, x: net.neuron(net.norm(x)), norm)))
        net.eval()
        compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
        x = torch.randn(5, 4, 6)
        torch.testing.assert_close(compiled(x), net(x))
        return
    check(Wrapped(lambda net, x: net.neuron(net.norm(x)), norm), [torch.randn(5, 4, 6)] * 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of modules that Inductor imports
def test_inductor():
    """Its C++ compiler takes seconds for each operation that is not ours."""
    net = Wrapped(lambda net, x: net.neuron(net.norm(x) + x))
    check(net, [torch.randn(5, 4, 6)], "inductor", 1e-3, dynamic=False)


def test_small_inputs_on_a_cpu(monkeypatch):
    monkeypatch.setattr(fused_norm, "MIN_VALUES", 5 * 4 * 6)
    for batch, in_block in ((3, False), (4, True)):
        graphs, net = Graphs(), Wrapped(lambda net, x: net.neuron(net.norm(x)))
        check(net, [torch.randn(5, batch, 6)], graphs, 1e-5)
        assert ("spikefuse.block.default" in graphs.forward[0]) == in_block
        torch.compiler.reset()


def test_earlier_calls_of_a_norm(monkeypatch):
    """Running statistics are updated in order, also where only the first call becomes a block."""
    monkeypatch.setattr(fused_norm, "MIN_VALUES", 5 * 4 * 6)

    def function(net, x):
        first, second = net.norm(x), net.norm(x[: len(x) // 2] + 1)
        return net.neuron(first) + second.mean()

    check(Wrapped(function), [torch.randn(5, 4, 6)], tolerance=1e-4)


def test_a_model():
    """tests/gpu/test_compile.py has the others."""
    torch.manual_seed(0)
    net = spikformer(lambda: sf.LIF(0.5, 0.5), 3, 10, (32, 32), depth=1, channels=48, num_heads=2)
    graphs = Graphs()
    eager = check(net, [torch.rand(2, 2, 3, 32, 32)], graphs)
    assert graphs.forward[0].count("spikefuse.block.default") == len(eager.fusion.fused)


@pytest.mark.parametrize("residual", [False, True])
def test_explicit_blocks(residual):
    block = sf.nn.Block(nn.BatchNorm1d(6), sf.PLIF(0.5, channels=6, threshold=0.5))
    other = copy.deepcopy(block)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    x, state = torch.randn(5, 4, 6), (torch.randn(4, 6),)
    results = []
    for run in (block, compiled):
        leaves = [t.clone().requires_grad_() for t in (x, x + 1, *state)]
        args = leaves[:2] if residual else leaves[:1]
        y, (v,) = run(*args, state=(leaves[2],), return_state=True)
        (y.sum() + (v * v).sum()).backward()
        results.append([y, v, leaves[0].grad, leaves[2].grad, *(p.grad for p in leaves[1:2])])
    for p, q in zip(block.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_assigned_settings_and_hooks():
    net = sf.fuse(sf.Temporal(nn.Sequential(nn.BatchNorm1d(6), sf.LIF(0.5, 0.5))))
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    x, seen = torch.randn(5, 4, 6), []
    for change in (
        lambda: None,
        lambda: setattr(net.net[1], "decay", 0.25),
        lambda: setattr(net.net[0], "eps", 0.5),
        lambda: setattr(net.net[1], "reset", "soft"),
    ):
        change()
        torch.testing.assert_close(compiled(x), net(x))
    net.net[0].register_forward_hook(lambda module, args, y: seen.append(y.shape))
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(net, backend="aot_eager")(x), net(x))
    assert seen == [(20, 6)] * 2


@pytest.mark.parametrize("residual", [False, True])
def test_gradient_hooks(residual):
    def function(net, x):
        h = net.first(x)
        y = net.norm(h) + h if residual else net.norm(h)
        if y.requires_grad:
            y.register_hook(lambda grad: 2 * grad)
        return net.neuron(y)

    net = Wrapped(function)
    net.first = nn.Linear(6, 6)
    check(net, [torch.randn(5, 4, 6)] * 2)
    expected, actual = sf.Temporal(net), sf.fuse(sf.Temporal(net))
    actual.compile(fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 4, 6)
    torch.testing.assert_close(actual(x, return_state=True), expected(x, return_state=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which Dynamo reads
def test_recomputed_functions():
    """A block inside torch.utils.checkpoint inside a compiled network."""
    layers = nn.Sequential(nn.BatchNorm1d(6), sf.LIF(0.5, 0.5))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            return checkpoint(self.layers, x, use_reentrant=False)

    net = sf.fuse(sf.Temporal(Net()))
    x = torch.randn(5, 4, 6, requires_grad=True)
    expected = torch.autograd.grad(net(x).sum(), x)[0]
    other = sf.fuse(sf.Temporal(Net()))
    y = torch.compile(other, backend="aot_eager")(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], expected)


@pytest.mark.parametrize("neuron", [sf.LIF(), sf.PLIF(channels=6)], ids=lambda n: type(n).__name__)
@pytest.mark.parametrize(("affine", "num_norms"), [(True, 1), (False, 1), (True, 2)])
def test_opcheck(neuron, affine, num_norms):
    inputs = tuple(make_input((20, 2, 6), seed=i).requires_grad_() for i in range(2))
    state = make_input((2, 6), seed=2).requires_grad_()
    request = Request(inputs, (state,), "numba")
    program = library.traced_program(neuron, True, num_norms == 2, request)
    weights = [torch.rand(6, requires_grad=True) for _ in range(num_norms)] if affine else []
    shift = torch.rand(6, requires_grad=affine)
    statistics = [
        torch.ops.spikefuse.norm_statistics(x.detach(), weight, 1e-5, "numba")[0].detach()
        for x, weight in zip(inputs, weights or [None], strict=False)
    ]
    own = [t.detach().requires_grad_() for t in program.own]
    tensors = [*inputs, state, *own, shift, *weights, *statistics]
    call = [program.name], tensors, [2, 1], program.scalars
    torch.library.opcheck(torch.ops.spikefuse.block.default, (*call, True, True))
    needed = [t.requires_grad for t in tensors]
    tensors = [t.detach() for t in tensors]
    y, v, *saved = torch.ops.spikefuse.block(call[0], tensors, *call[2:], True, True)
    for flags in (needed, [False, True, False, *needed[3:]]):
        arguments = call[0], [*tensors, *saved], *call[2:], [y, v], flags
        torch.library.opcheck(torch.ops.spikefuse.block_backward.default, arguments)


class Uncompiled(nn.Module):
    """A layer that torch.compile leaves alone, so that it compiles the others one by one."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    @torch.compiler.disable
    def forward(self, x):
        return self.net(x)


@pytest.mark.filterwarnings("ignore")  # Dynamo's, about what it leaves to Python
@pytest.mark.parametrize("uncompiled", ["first", "norm", "neuron", "last"])
def test_a_network_that_is_compiled_in_part(uncompiled):
    """A norm and its neuron are in one graph, in several, or in none."""

    class Layers(nn.Module):
        def __init__(self, *uncompiled):
            super().__init__()
            self.linear, self.norm = nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6)
            self.neuron = sf.LIF(0.5)
            for name in uncompiled:
                setattr(self, name, Uncompiled(getattr(self, name)))

        def forward(self, x):
            return self.neuron(self.norm(self.linear(x)))

    nets = {
        "first": (Uncompiled(Layers()), Layers(), Layers()),
        "last": (Layers(), Layers(), Uncompiled(Layers())),
        "norm": (Layers(), Layers("norm"), Layers()),
        "neuron": (Layers(), Layers("neuron"), Layers()),
    }
    check(nn.Sequential(*nets[uncompiled]), [torch.randn(4, 3, 6)] * 2, fullgraph=False)
