"""`nn.MaxPool2d` alone, inside Temporal, and inserted by `fuse`."""

from __future__ import annotations

import contextlib
import copy
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

import spikefuse as sf
from spikefuse.kernels import pool as kernels
from spikefuse.memory import Checkpoint
from spikefuse.nn import pool
from spikefuse.testing import make_input
from tests.memory.measuring import packings
from tests.memory.networks import assert_same, step

SHAPE = (3, 2, 3, 8, 8)  # T, B, C, H, W
SPIKES = 3 * 2 * 16 * 8 * 8


class Net(nn.Module):
    """Pooling of spikes, twice."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), sf.LIF(0.5, 0.3)
        )
        self.pool = nn.MaxPool2d(3, stride=1, padding=1)
        self.last = nn.MaxPool2d(2, padding=1)
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.lif, self.head = sf.LIF(0.5, 0.3), nn.Conv2d(16, 4, 1)

    def forward(self, x):
        y = self.lif(self.norm(self.conv(self.pool(self.stem(x)))))
        return self.head(self.last(y)).flatten(1)


@pytest.fixture
def called(backends):
    """Calls of our kernels, which run in the interpreter on a CPU."""
    if "triton" not in backends.impls:
        pytest.skip("Triton compiles for the GPU here")
    ours = mock.patch.object(kernels, "max_pool2d", wraps=kernels.max_pool2d)
    everywhere = mock.patch.object(pool, "_backend", return_value="triton")
    with ours as function, everywhere if backends.device == "cpu" else contextlib.nullcontext():
        yield function


def make(policy=None, device="cpu"):
    torch.manual_seed(0)
    return sf.Temporal(Net(), policy).to(device)


def trained(net, x):
    net = copy.deepcopy(net)
    return [*step(net, x), *net.buffers()]


@pytest.mark.parametrize("policy", [None, Checkpoint(1)], ids=str)
def test_training_is_equal(backends, called, policy):
    """With and without our kernels, bit for bit."""
    x, net = make_input(SHAPE, device=backends.device), make(policy, backends.device)
    net = sf.fuse(net)
    with mock.patch.object(kernels, "maps_of", return_value=None):
        expected = trained(net, x)
    assert not called.called
    assert_same(trained(net, x), expected)
    assert called.called


@pytest.mark.parametrize("is_large", [False, True])
def test_which_calls_use_a_kernel(backends, is_large, monkeypatch):
    x, net = torch.rand(2, 1, 3, 4, 4, device=backends.device), sf.Temporal(sf.nn.MaxPool2d(2))
    monkeypatch.setattr(pool, "MIN_VALUES", x.numel() + (not is_large))
    ours = mock.patch.object(kernels, "max_pool2d", wraps=kernels.max_pool2d)
    for impl in ("auto", "numba", "triton", "reference"):
        with ours as called:
            net(x, impl=impl)
        expected = []
        if "triton" in backends.impls and (impl == "triton" or (x.is_cuda and impl == "auto")):
            expected = ["triton"]
        elif x.is_cpu and is_large and impl in ("auto", "numba"):
            expected = ["numba"]
        assert [call.args[2] for call in called.call_args_list] == expected


def test_networks_on_a_cpu(monkeypatch):
    """The kernel of the CPU, in training, bit for bit, and which other inputs PyTorch computes."""
    monkeypatch.setattr(pool, "MIN_VALUES", 0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), sf.LIF(0.5, 0.3), nn.MaxPool2d(2)
    net = sf.Temporal(nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 3 * 3, 2)))
    x, fused = make_input(SHAPE), sf.fuse(net)
    with mock.patch.object(kernels, "max_pool2d", wraps=kernels.max_pool2d) as called:
        found = trained(fused, x)
        assert [call.args[2] for call in called.call_args_list] == ["numba"]
        assert_same([F.max_pool2d(x[0], 2), F.max_pool2d(x[0].mT, 2)],
                    [pool.max_pool2d(x[0], 2), pool.max_pool2d(x[0].mT, 2)])  # fmt: skip
        assert called.call_count == 2
    with mock.patch.object(kernels, "maps_of", return_value=None):
        assert_same(found, trained(fused, x))


def test_convolutions_save_maxima_as_bits(backends, called):
    """PyTorch's pooling also saves its input spikes, twice here."""
    x, net = make_input(SHAPE, device=backends.device), sf.fuse(make(None, backends.device))
    with packings() as seen:
        net(x)
    assert seen == [SPIKES]
    with mock.patch.object(kernels, "maps_of", return_value=None), packings() as seen:
        net(x)
    assert seen == [SPIKES] * 3


@pytest.mark.parametrize("layer", [sf.nn.MaxPool2d(2), sf.nn.MaxPool2d(2, 1, 1, 2)])
def test_only_selections_of_spikes_are_packed(backends, called, layer):
    """Not maxima of other values, nor of windows with dilation, which may be empty."""
    at, size = (0, 12) if layer.dilation == 1 else (1, 24)
    layers = [nn.Conv2d(3, 16, 1), sf.LIF(0.5, 0.3), nn.Conv2d(16, 2, 1)]
    layers.insert(at, layer)
    net = sf.Temporal(nn.Sequential(*layers)).to(backends.device)
    with packings() as seen:
        net(make_input((4, 2, 3, 24, 24), device=backends.device))
    assert seen == [4 * 2 * 16 * size * size]


class TwoReaders(nn.Module):
    """Two neurons read the maxima, which a cut saves."""

    def __init__(self, layer):
        super().__init__()
        self.stem, self.pool = nn.Sequential(nn.Conv2d(3, 4, 1), sf.LIF(0.5, 0.3)), layer
        self.left, self.right = sf.LIF(0.5, 0.3), sf.LIF(0.5, 0.3)

    def forward(self, x):
        y = self.pool(self.stem(x))
        return self.left(y) + self.right(2.0 * y)


@pytest.mark.parametrize("kind", [nn.MaxPool2d, sf.nn.MaxPool2d])
def test_checkpoint_saves_maxima_as_bits(backends, kind):
    x, found = make_input((3, 2, 3, 32, 32), device=backends.device), []
    for policy in (None, Checkpoint()):
        torch.manual_seed(0)
        net = sf.fuse(sf.Temporal(TwoReaders(kind(2)), policy)).to(backends.device)
        with packings() as seen:
            found.append(trained(net, x))
    assert_same(*found)
    assert seen == [3 * 2 * 4 * 16 * 16]


def test_explain_reports_pooling(backends, called):
    x = make_input(SHAPE, device=backends.device)
    eager = sf.explain(make(sf.memory.SaveAll(), backends.device), x, impl="reference")
    called.reset_mock()
    fused = sf.explain(sf.fuse(make(None, backends.device)), x)
    assert called.called
    assert sum(row.eager for row in fused.saved) == sum(row.now for row in eager.saved)
    (row,) = [row for row in fused.saved if row.name == "net.pool"]
    assert (row.now, row.eager) == (SPIKES, 12 * SPIKES)


@pytest.mark.parametrize("options", [(2,), (3, 2, 1), (3, 2, 1, 2), (2, 2, 0, 1, False, True)])
def test_the_module_alone(backends, options):
    """Including inputs that PyTorch computes."""
    ours, theirs = sf.nn.MaxPool2d(*options), nn.MaxPool2d(*options)
    x = make_input((2, 3, 9, 10), device=backends.device)
    for y in (x, x[0], x.double(), x.transpose(2, 3), x.requires_grad_()):
        assert_same([ours(y)], [theirs(y)])


def integers(kind):
    return [
        (kind(2),),
        ((kind(3), kind(2)), (kind(2), kind(1)), (kind(1), kind(0))),
        ([kind(2)], kind(1), kind(1), kind(1)),
        (2, 2, 0, (kind(1), kind(1))),
        (2, 1, 0, kind(2)),
    ]


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor])
def test_integers_of_any_type(backends, called, kind):
    x = make_input((2, 3, 9, 10), device=backends.device)
    for options in integers(kind):
        called.reset_mock()
        assert_same([pool.max_pool2d(x, *options)], [F.max_pool2d(x, *options)])
        assert called.called == (options[3:] != (2,))


def test_without_triton(backends, called):
    x = make_input((1, 1, 4, 4), device=backends.device)
    without = mock.patch("spikefuse.scan.checks._HAS_TRITON", False)
    with without, pytest.raises(ImportError, match=r'pip install "spikefuse\[gpu\]"'):
        sf.nn.MaxPool2d(2)(x)


def test_return_indices(backends):
    x = make_input((2, 3, 9, 10), device=backends.device)
    found = sf.nn.MaxPool2d(3, 2, 1, return_indices=True)(x)
    assert_same(found, nn.MaxPool2d(3, 2, 1, return_indices=True)(x))


REFUSED = [(0,), (2, 0), (2, 1, 2), (9, 1, 0), ((2, 2, 2),), (2.0,), ((2, "2"),), (True,)]


@pytest.mark.parametrize("options", REFUSED)
def test_errors_are_those_of_pytorch(backends, called, options):
    x, messages = make_input((2, 3, 4, 4), device=backends.device), []
    for kind in (nn.MaxPool2d, sf.nn.MaxPool2d):
        with pytest.raises((RuntimeError, TypeError)) as caught:
            kind(*options)(x)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_traced(backends):
    x = torch.rand(2, 64, 32, 32, device=backends.device)
    traced = torch.jit.trace(sf.nn.MaxPool2d(2), x)
    assert torch.equal(traced(x), F.max_pool2d(x, 2))


# PyTorch itself uses a deprecated function here.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_transforms(backends):
    layer, x = sf.nn.MaxPool2d(3, 2, 1), make_input((2, 3, 9, 10), device=backends.device)
    expected = nn.MaxPool2d(3, 2, 1)(x)
    assert torch.equal(torch.func.vmap(layer)(x[None])[0], expected)
    with forward_ad.dual_level():
        dual = layer(forward_ad.make_dual(x, x))
        assert torch.equal(forward_ad.unpack_dual(dual).tangent, expected)


def test_compiled(backends):
    layer, x = sf.nn.MaxPool2d(3, 2, 1), make_input((2, 3, 9, 10), device=backends.device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))
