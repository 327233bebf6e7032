"""Parts of a network that backward recomputes."""

from __future__ import annotations

import copy
import gc
from collections import deque
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint as torch_checkpoint

import spikefuse as sf
from spikefuse.memory import SaveAll
from spikefuse.testing import make_input
from spikefuse.transforms.converters.spikingjelly import SequenceDropout
from tests.memory.measuring import bytes_saved, packings
from tests.memory.networks import SHAPE, SPIKES, assert_same, conv, step, train, wrapped
from tests.queues import Queues

plain = partial(torch_checkpoint.checkpoint, use_reentrant=False)
reentrant = partial(torch_checkpoint.checkpoint, use_reentrant=True)


class Part(nn.Module):
    """A part of a network, called by a function."""

    def __init__(self, part: nn.Module, call) -> None:
        super().__init__()
        self.part, self.call = part, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


CALLS = {
    "module": lambda m, x: sf.checkpoint(m.part, x),
    "keyword": lambda m, x: sf.checkpoint(m.part, input=x),
    "method": lambda m, x: sf.checkpoint(m.part.forward, x),
    "function": lambda m, x: sf.checkpoint(lambda y: m.part(y), x),
    "nested": lambda m, x: sf.checkpoint(lambda y: sf.checkpoint(m.part, y["x"][0]), {"x": [x]}),
    "module as an argument": lambda m, x: sf.checkpoint(lambda f, y: f(y), m.part, x),
}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    neurons = sf.PLIF(0.5, 0.3, channels=8), sf.LIF(0.5, 0.2)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), neurons[0], nn.Dropout(0.3), nn.Linear(8, 8), neurons[1]
    )


def network(call=None, policy=None) -> sf.Temporal:
    part = layers()
    head = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4, momentum=None), sf.LIF(0.5, 0.2))
    inner = part if call is None else Part(part, call)
    return sf.Temporal(nn.Sequential(inner, head), policy)


@pytest.mark.parametrize("policy", [None, SaveAll()], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_changes_nothing(name, policy):
    """Dropout, running statistics, and further steps included."""
    expected, net = network(policy=policy), network(CALLS[name], policy)
    for _ in range(2):
        x = make_input((5, 4, 6))
        assert_same(train(net, x), train(expected, x))


@pytest.mark.parametrize("name", ["module", "function"])
def test_outside_a_container(name):
    x = make_input((20, 6))
    net = Part(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU()), CALLS[name])
    expected = train(copy.deepcopy(net.part), x)
    assert_same(train(net, x), expected)


def test_a_function_of_global_modules():
    x = make_input((20, 6))
    expected = train(copy.deepcopy(GLOBAL), x)
    function = Part(GLOBAL, lambda _, x: sf.checkpoint(apply_global, x))
    assert_same(train(function, x), expected)


GLOBAL = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))


def apply_global(x: Tensor) -> Tensor:
    return GLOBAL(x)


def test_a_lone_neuron_and_a_container():
    x = make_input((5, 4, 6)).requires_grad_()
    for module in (sf.LIF(), sf.Temporal(layers().eval())):
        (expected,) = torch.autograd.grad(module(x).sum(), x)
        assert torch.equal(torch.autograd.grad(sf.checkpoint(module, x).sum(), x)[0], expected)


def test_states_and_other_implementations(backends):
    """The second run begins from the same states, and leaves those that are returned alone."""
    x = make_input((5, 4, 6), device=backends.device)

    def run(net, impl):
        net = net.to(backends.device)
        torch.manual_seed(1)
        _, state = net(x, return_state=True)
        y, last = net(x, state=state, return_state=True, impl=impl)
        values = [v.clone() for states in last.values() for v in states]
        (y.sum() + sum(v.sum() for states in last.values() for v in states)).backward()
        assert_same([v for states in last.values() for v in states], values)
        return [y, *values, *(p.grad for p in net.parameters()), *net.buffers()]

    for impl in (*backends.impls, "reference"):
        assert_same(run(network(CALLS["module"]), impl), run(network(), impl))


def test_shapes_do_not_interfere():
    """T and B are those of the call, whatever other calls had as many rows."""
    grads = []
    for call in (None, CALLS["module"]):
        net = network(call).eval()
        outputs = [net(make_input(shape)) for shape in ((4, 2, 6), (2, 4, 6), (8, 1, 6))]
        sum(y.sum() for y in outputs).backward()
        grads.append([p.grad for p in net.parameters()])
    assert_same(*grads)


def test_backward_twice():
    net, x = network(CALLS["module"]), make_input((5, 4, 6)).requires_grad_()
    y = net(x).sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    buffers = [b.clone() for b in net.buffers()]
    assert torch.equal(torch.autograd.grad(y, x)[0], first)
    assert_same(list(net.buffers()), buffers)


def test_without_gradients():
    net, x = network(CALLS["module"]).eval(), make_input((5, 4, 6))
    with torch.no_grad():
        assert torch.equal(net(x), network().eval()(x))


def test_frozen_norms_are_restored_after_an_error():
    norm = nn.BatchNorm1d(6)
    calls = []

    def fails_later(x):
        calls.append(x)
        if len(calls) > 1:
            raise RuntimeError("in the second run")
        return norm(x)

    before = dict(norm.named_buffers())
    with pytest.raises(RuntimeError, match="in the second run"):
        sf.checkpoint(fails_later, make_input((8, 6)).requires_grad_()).sum().backward()
    assert all(b is before[name] for name, b in norm.named_buffers())


def test_spikes_that_cross_are_bits(backends):
    """What the part reads, and what the layer behind it reads."""

    class Inner(nn.Module):
        def __init__(self, call):
            super().__init__()
            self.first = conv()
            self.part, self.head = conv(nn.Conv2d(8, 8, 1), sf.LIF())[2:], nn.Conv2d(8, 4, 1)
            self.call = call

        def forward(self, x):
            return self.head(self.call(self.part, self.first(x)))

    x = make_input(SHAPE, device=backends.device)
    expected = step(wrapped(lambda: Inner(lambda f, x: f(x)), SaveAll(), backends.device), x)
    net = wrapped(lambda: Inner(sf.checkpoint), device=backends.device)
    with packings() as seen:
        assert_same(step(net, x), expected)
    assert seen == [SPIKES, SPIKES]


def test_inside_nothing_is_saved(backends):
    class All(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = conv(nn.Conv2d(8, 4, 1))

        def forward(self, x):
            return sf.checkpoint(self.part, x)

    x = make_input(SHAPE, device=backends.device)
    size, y = bytes_saved(wrapped(All, device=backends.device), x)
    assert size == y.nbytes


def test_memory_is_freed():
    """The graph holds neither its own results nor those of the call."""
    net = network(CALLS["module"])
    y, state = net(make_input((5, 4, 6)), return_state=True)
    storages = [StorageWeakRef(v.untyped_storage()) for v in (y, *state["net.0.part.5"])]
    del y, state
    gc.collect()
    assert all(storage.expired() for storage in storages)


@pytest.mark.parametrize("call", [plain, reentrant], ids=["plain", "reentrant"])
def test_torch_checkpoint_inside_a_container_is_refused(call):
    """It calls neurons when the call that knows T is over; calls after it are as before."""
    net = network(lambda m, x: call(m.part, x)).eval()
    expected = network().eval()
    for shape in ((4, 2, 6), (2, 4, 6)):
        x = make_input(shape).requires_grad_()
        y = net(x)
        assert torch.equal(y, expected(x))
        with pytest.raises(RuntimeError, match=r"recomputes PLIF .*: use spikefuse.checkpoint"):
            y.sum().backward()
    for shape in ((4, 2, 6), (2, 4, 6), (8, 1, 6)):
        found = network(CALLS["module"]).eval()
        found.net[0].part = net.net[0].part
        x = make_input(shape)
        assert_same(step(found, x), step(expected, x))


def test_an_error_leaves_no_hooks():
    def fail(x):
        raise ValueError("no layer")

    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="no layer") as error:
        sf.checkpoint(fail, x)
    with torch.autograd.graph.disable_saved_tensors_hooks("none are active"):
        pass
    assert error.traceback[-1].name == "fail"


def test_torch_checkpoint_around_ours():
    """It recomputes no neuron, unless it is reentrant."""
    x = make_input((4, 2, 6))
    net = network(lambda m, x: plain(lambda y: sf.checkpoint(m.part, y), x))
    assert_same(step(net, x), step(network(), x))
    net = network(lambda m, x: reentrant(lambda y: sf.checkpoint(m.part, y), x))
    with pytest.raises(RuntimeError, match=r"use spikefuse.checkpoint"):
        net(x.requires_grad_()).sum().backward()


class Step(Part):
    """The body of a loop."""

    def forward(self, x: Tensor, last: Tensor) -> Tensor:  # type: ignore[override]
        return self.call(self.part, x)


#: Layers that read `[T*B, ...]` inside a container.
LAYERS = {
    "neuron": lambda: sf.LIF(0.5, 0.3),
    "over time": lambda: sf.OverTime(nn.Softmax(0)),
    "events": lambda: nn.Sequential(sf.LIF(0.5, 0.3), sf.nn.EventLinear(6, 6)),
    "dropout": lambda: SequenceDropout(0.5),
}


@pytest.mark.parametrize("call", [plain, reentrant], ids=["plain", "reentrant"])
@pytest.mark.parametrize("name", LAYERS)
def test_torch_checkpoint_inside_a_container_that_is_gone(call, name):
    """Our checkpoint, which the error names, has the gradients of a network without one."""
    layer = LAYERS[name]()

    def gradient(function):
        x = make_input((4, 2, 6)).requires_grad_()
        torch.manual_seed(0)
        y = sf.Temporal(Part(layer, lambda m, x: function(m.part, x)))(x)
        y.square().sum().backward()
        return x.grad

    expected = gradient(lambda f, x: f(x))
    assert expected.any()
    assert torch.equal(gradient(sf.checkpoint), expected)
    with pytest.raises(RuntimeError, match=r"recomputes \w+ .*: use spikefuse.checkpoint"):
        gradient(call)


@pytest.mark.parametrize("call", [plain, reentrant], ids=["plain", "reentrant"])
def test_torch_checkpoint_inside_a_loop(call):
    """A step `[B, ...]` of its body is not read as time."""
    x = make_input((4, 2, 6)).requires_grad_()
    y = sf.Loop(Step(sf.LIF(), call), (6,))(x)
    with pytest.raises(RuntimeError, match=r"recomputes LIF .*: use spikefuse.checkpoint"):
        y.sum().backward()


@pytest.mark.parametrize("call", [plain, reentrant], ids=["plain", "reentrant"])
def test_torch_checkpoint_of_sequences(call):
    """Neurons that read `[T, B, ...]` themselves, and containers."""
    for module in (sf.LIF(), sf.Temporal(layers().eval())):
        x = make_input((4, 2, 6)).requires_grad_()
        (expected,) = torch.autograd.grad(module(x).sum(), x)
        call(module, x).sum().backward()
        assert torch.equal(x.grad, expected)


def test_a_neuron_called_in_a_backward_pass():
    """It is not recomputed: a function of the user's calls it."""
    neuron = sf.LIF()
    net = sf.Temporal(neuron)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return neuron(g)

    x = make_input((4, 2, 6)).requires_grad_()
    Function.apply(x).sum().backward()
    assert torch.equal(x.grad, net(torch.ones_like(x)))


class Numbered:
    """Statistics over one process, which counts."""

    def __init__(self):
        self.gathered = 0

    def sum(self, x):
        pass

    def gather(self, x):
        self.gathered += 1
        return x[None]


def in_two(call, count, x):
    """Outputs and gradients of two halves of a sequence, which two queues connect."""
    forth, back, outputs, tensors = deque(), deque(), [], []
    for half, is_first in zip(x.split(len(x) // 2), (True, False), strict=True):
        net = network(call)
        net.passing = Queues(is_first, forth, back, count)
        leaf = half.clone().requires_grad_()
        torch.manual_seed(1)
        outputs.append(net(leaf))
        tensors += [leaf, *net.parameters()]
    assert not forth
    for output in reversed(outputs):
        output.square().sum().backward()
    assert not forth
    assert not back
    return [*outputs, *(t.grad for t in tensors)]


@pytest.mark.parametrize("count", [1, 2])
def test_states_of_other_processes_travel_once(count):
    x = make_input((6, 4, 6))
    assert_same(in_two(CALLS["module"], count, x), in_two(None, count, x))


def test_statistics_are_gathered_once():
    block = sf.nn.Block(nn.BatchNorm1d(6), sf.LIF())
    x, counts = make_input((5, 4, 6)), []
    for call in (lambda f, x: f(x), sf.checkpoint):
        net = sf.Temporal(Part(copy.deepcopy(block), lambda m, x, call=call: call(m.part, x)))
        net.passing = Queues(True, deque(), deque(), 1)
        net.passing.is_last, net.passing.statistics = True, Numbered()
        counts.append(train(net, x))
        assert net.passing.statistics.gathered == 1
    assert_same(*counts)
