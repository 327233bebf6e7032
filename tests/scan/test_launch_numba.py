"""Streamed results, sums of several threads, and states that share memory."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import spikefuse as sf
from spikefuse.kernels import numba_host
from spikefuse.kernels.numba_runtime import add_by_channel
from spikefuse.scan import launch_numba

# Whole pieces and lines of memory, fractions of both, and rows that begin anywhere.
SIZES = [1, 15, 1024, 4096 + 256 + 3]

pytestmark = pytest.mark.usefixtures("two_threads")


def run(neuron, x, grad):
    y = neuron(x, impl="numba")
    (gx,) = torch.autograd.grad(y, x, grad)
    return y.detach(), gx


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
def test_streaming_changes_nothing(monkeypatch, dtype, size):
    generator = torch.Generator().manual_seed(size)
    x, grad = (torch.randn(19, 3, size, generator=generator).to(dtype) for _ in range(2))
    x = x.requires_grad_()
    results = []
    for least in (1 << 60, 0):
        monkeypatch.setattr(launch_numba, "_STREAMED", least)
        monkeypatch.setattr(launch_numba, "_MIN_ROW", 1)
        # A call remembers whether it streams.
        clear()
        results.append(run(sf.LIF(decay=0.5, threshold=0.7), x, grad))
    for plain, streamed in zip(*results, strict=True):
        assert torch.equal(plain, streamed)


def test_streams_inside_other_strides(monkeypatch):
    """Neighbours in groups of `inner`: short rows, not one."""
    monkeypatch.setattr(launch_numba, "_STREAMED", 0)
    monkeypatch.setattr(launch_numba, "_MIN_ROW", 1)
    clear()
    x = torch.randn(7, 4, 40, generator=torch.Generator().manual_seed(0))[:, :, :17]
    grad = torch.randn_like(x)
    x = x.requires_grad_()
    y, gx = run(sf.LIF(), x, grad)
    expected = sf.LIF()(x, impl="reference")
    assert torch.equal(y, expected)
    torch.testing.assert_close(gx, torch.autograd.grad(expected, x, grad)[0])


def clear():
    from spikefuse.scan.execution import execution_for

    execution_for.cache_clear()


@pytest.fixture(autouse=True)
def calls():
    clear()
    yield
    clear()


def test_a_large_tensor_is_moved_to_huge_pages_once(monkeypatch):
    advised = []
    monkeypatch.setattr(numba_host, "_madvise", lambda *arguments: advised.append(arguments))
    large, small = torch.ones(1 << 21), torch.ones(1 << 10)
    for x in (large, small, large.view(2, -1)[1]):
        numba_host.move_to_huge_pages(x)
    ((start, size, _),) = advised
    assert 0 <= start.value - large.data_ptr() < 4096
    assert start.value + size.value <= large.data_ptr() + large.nbytes


@settings(deadline=None)  # the first call compiles
@given(*[st.integers(*limits) for limits in ((1, 900), (0, 60), (1, 7), (1, 9))])
def test_sums_by_channel(count, first, channels, inner):
    values = np.arange(1, count + 1, dtype=np.float32)
    sums, expected = np.zeros(3 + channels), np.zeros(3 + channels)
    np.add.at(expected, 3 + (first + np.arange(count)) // inner % channels, values)
    add_by_channel(values, count, sums, 3, first, channels, inner)
    assert np.array_equal(sums, expected)


@pytest.mark.usefixtures("any_threads")
@pytest.mark.parametrize("inner", [(), (3, 5)])
def test_gradients_by_channel_of_any_number_of_threads(inner):
    """Ranges of threads begin and end in the middle of samples."""
    neuron = sf.PLIF(channels=5)
    x = torch.randn(4, 29, 5, *inner, generator=torch.Generator().manual_seed(0))

    def gradient(threads):
        torch.set_num_threads(threads)
        neuron.zero_grad()
        neuron(x).square().sum().backward()
        return neuron.decay.logit.grad

    expected = gradient(1)
    for threads in (2, 3, 4):
        torch.testing.assert_close(gradient(threads), expected, rtol=1e-5, atol=1e-6)


class DelayLine(sf.Neuron):
    """States that are late copies of others: a line that feeds back, a copy with another start, and
    two states that swap."""

    a, b, c, d, e, f = (sf.State(value) for value in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5))

    def __init__(self, *scale):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.75))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.0, *scale)) if scale else 0.5

    def step(self, x, a, b, c, d, e, f):
        y = self.weight * x + self.scale * (b * c + d - f)
        return torch.sin(y), (0.5 * torch.sin(a * c) + x, a, b, e, d, a)


@pytest.mark.parametrize("scale", [(), (5,)], ids=["one value", "channels"])
@pytest.mark.parametrize("num_steps", [1, 3, 40])
def test_gradients_of_a_delay_line(num_steps, scale):
    """In float64, with and without parameters per channel beside one of one value."""
    generator = torch.Generator().manual_seed(0)
    neuron, shape = DelayLine(*scale), (num_steps, 3, 5)
    inputs = torch.randn(2, *shape, generator=generator), torch.rand(7, 3, 5, generator=generator)

    def results(impl, dtype):
        (x, grad), starts = (t.to(dtype, copy=True) for t in inputs)
        leaves = [x.requires_grad_(), *(s.requires_grad_() for s in starts[:6])]
        own = copy.deepcopy(neuron).to(dtype)
        y, final = own(x, state=leaves[1:], return_state=True, impl=impl)
        loss = (y * grad).sum() + sum((s * starts[6]).sum() for s in final)
        return y, *final, *torch.autograd.grad(loss, [*leaves, *own.parameters()])

    expected = results("reference", torch.float64)
    for found, value in zip(results("numba", torch.float32), expected, strict=True):
        torch.testing.assert_close(found.double(), value, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("any_threads")
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("cached", [1, 100, 1 << 17])
def test_products_with_spikes(heads, cached, monkeypatch):
    monkeypatch.setattr(launch_numba, "_CACHED", cached)
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(7, 5, 51, generator=generator)
    spikes = (torch.rand(7, 5, 51, generator=generator) < 0.1).float()
    split = [x.double().reshape(35, heads, -1) for x in (grad, spikes)]
    expected = torch.einsum("rhi,rhj->hij", *split).float()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found = launch_numba.spike_product(grad, spikes, heads)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert launch_numba.spike_product(grad, torch.ones_like(spikes), heads) is None
