"""Max pooling kernels equal PyTorch bit for bit: values, positions and gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch._prims_common import suggest_memory_format

from spikefuse.kernels import pool
from spikefuse.testing import DTYPES, poisoned

FORMATS = (torch.contiguous_format, torch.channels_last)
INF, NAN = float("inf"), float("nan")

WINDOWS = {
    "2 by 2": pool.Window((2, 2), (2, 2), (0, 0)),
    "3 by 3": pool.Window((3, 3), (2, 2), (1, 1)),
    "every pixel": pool.Window((3, 3), (1, 1), (1, 1)),
    "rectangular": pool.Window((3, 4), (2, 1), (0, 2), True),
    "ceil": pool.Window((3, 3), (2, 2), (1, 1), True),
    "gaps": pool.Window((2, 1), (3, 2), (1, 0)),
    "gaps and ceil": pool.Window((1, 2), (3, 3), (0, 1), True),
}


@pytest.fixture
def device(backends):
    if "triton" not in backends.impls:
        pytest.skip("Triton compiles for the GPU here")
    return backends.device


def draw(kind, shape=(2, 16, 7, 9), seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if kind == "spikes":
        return (x > 0.8).float()
    if kind == "ties":
        return x.round()
    if kind == "extreme":
        values = torch.tensor([-INF, -INF, -INF, NAN, INF, -0.0, 0.0])
        return values[torch.randint(7, shape, generator=generator)]
    return x


def gradient(y, seed=1):
    """Integers, whose sums are exact in any dtype, and in the interpreter, which truncates."""
    generator = torch.Generator().manual_seed(seed)
    g = torch.randint(-9, 10, y.shape, generator=generator)
    return g.to(y).contiguous(memory_format=torch.contiguous_format)


def by_torch(x, window):
    return F.max_pool2d(x, *window[:3], 1, window.ceil_mode, return_indices=True)


def flat(positions, window, x):
    """Convert positions in windows to PyTorch's pixel indices."""
    kernel, stride, padding, _ = window
    rows, columns = (torch.arange(n, device=x.device) for n in positions.shape[2:])
    row = rows[:, None] * stride[0] - padding[0] + positions.long() // kernel[1]
    column = columns * stride[1] - padding[1] + positions.long() % kernel[1]
    return row * x.shape[3] + column


def assert_equal(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, check_stride=True)
    # Zeros must have equal signs.
    assert torch.equal(a.signbit() & (a == 0), b.signbit() & (b == 0))


def assert_same(x, window, grad=None, reference=None, backend="triton"):
    """Compare values, positions and gradients of the kernels and PyTorch.

    Args:
        reference: `x` in the memory format in which PyTorch pools it; defaults to `x`.
    """
    maps = pool.maps_of(x, window)
    reference = x if reference is None else reference
    expected, indices = by_torch(reference, window)
    memory_format = suggest_memory_format(x)
    expected = expected.contiguous(memory_format=memory_format)
    with poisoned():
        found, positions = pool._kernels(backend).forward(x, maps, save=True)
        assert_equal(found, expected)
        assert torch.equal(flat(positions, window, x), indices)
        assert_equal(pool.max_pool2d(x, maps, backend), expected)
        ours, theirs = x.detach().requires_grad_(), reference.detach().requires_grad_()
        y = pool.max_pool2d(ours, maps, backend)
        grad = gradient(y) if grad is None else grad
        (a,) = torch.autograd.grad(y, ours, grad)
    (b,) = torch.autograd.grad(by_torch(theirs, window)[0], theirs, grad)
    assert_equal(a, b.contiguous(memory_format=memory_format))


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("name", WINDOWS)
def test_windows(device, name, memory_format):
    assert_same(draw("ties").to(device).contiguous(memory_format=memory_format), WINDOWS[name])
    # For infinities and NaN, PyTorch on a GPU returns other positions in channels-last memory.
    x = draw("extreme").to(device)
    assert_same(x.contiguous(memory_format=memory_format), WINDOWS[name], reference=x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("channels", [3, 16])
def test_dtypes(device, dtype, memory_format, channels):
    x = draw("spikes", (3, channels, 6, 5)).to(device, dtype)
    x = x.contiguous(memory_format=memory_format)
    x[0] = 0
    assert_same(x, WINDOWS["3 by 3"])


@pytest.mark.parametrize("memory_format", FORMATS)
def test_gradients_are_summed_in_float32(device, memory_format):
    """In the order of the outputs, as PyTorch does in float32, and rounded once."""
    window = WINDOWS["every pixel"]
    x = draw("spikes").to(device).contiguous(memory_format=memory_format)
    grad = torch.randn(by_torch(x, window)[0].shape, device=device)
    assert_same(x, window, grad)
    half, exact = x.half().requires_grad_(), x.requires_grad_()
    y = pool.max_pool2d(half, pool.maps_of(half, window), "triton")
    (a,) = torch.autograd.grad(y, half, grad.half())
    (b,) = torch.autograd.grad(by_torch(exact, window)[0], exact, grad.half().float())
    assert_equal(a, b.half())


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (5, 1, 4, 4), (2, 32, 1, 1), (1, 3, 2, 70)])
def test_shapes(device, shape):
    for memory_format in FORMATS:
        x = draw("ties", shape).to(device).contiguous(memory_format=memory_format)
        window = pool.Window((1, 2), (1, 1), (0, 1))
        maps = pool.maps_of(x, window)
        expected = by_torch(x, window)[0]
        assert torch.equal(pool.max_pool2d(x, maps, "triton"), expected)


@pytest.mark.parametrize("most", [150, 16 * 63])
@pytest.mark.parametrize("memory_format", FORMATS)
def test_groups_of_maps(device, memory_format, most, monkeypatch):
    """Memory beyond the range of 32-bit offsets is cut into groups."""
    from spikefuse.kernels import pool_triton

    x = draw("ties", (7, 2, 7, 9)).to(device).contiguous(memory_format=memory_format)
    monkeypatch.setattr(pool_triton, "MAX_MAP", most)
    pool_triton._launch.cache_clear()
    try:
        assert_same(x, WINDOWS["3 by 3"])
    finally:
        pool_triton._launch.cache_clear()


KINDS = ("spikes", "ties", "extreme")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 7, 9), (1, 2, 2, 2), (2, 4, 16, 66)])
def test_pairs_on_a_cpu(any_threads, shape, dtype):
    """Windows of 2 by 2, with and without a last row and column that no window has."""
    for kind, threads in itertools.product(KINDS, (1, 3)):
        torch.set_num_threads(threads)
        assert_same(draw(kind, shape).to(dtype), WINDOWS["2 by 2"], backend="numba")


@pytest.fixture(params=["triton", "numba"])
def backend(request, backends):
    if request.param not in backends.impls:
        pytest.skip(f"no {request.param} on this device")
    return request.param


def test_saved_bytes(device, backend):
    """One byte per output, without the input."""
    x = draw("spikes").to(device).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = pool.max_pool2d(x, pool.maps_of(x, WINDOWS["2 by 2"]), backend)
    assert [(t.dtype, t.shape) for t in saved] == [(torch.uint8, y.shape)]


def test_no_second_derivative(device, backend):
    x = draw("ties").to(device).requires_grad_()
    y = pool.max_pool2d(x, pool.maps_of(x, WINDOWS["2 by 2"]), backend)
    (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


def test_a_device_that_is_not_current(device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert_same(draw("ties").to("cuda:1"), WINDOWS["3 by 3"])


def test_windows_on_a_cpu():
    """The kernel reads whole windows of 2 by 2, side by side, in contiguous memory."""
    two, ceil = WINDOWS["2 by 2"], pool.Window((2, 2), (2, 2), (0, 0), True)
    even, odd = torch.rand(2, 3, 8, 6), torch.rand(2, 3, 8, 7)
    assert all(pool.maps_of(x, two).has_pairs for x in (even, odd))
    assert pool.maps_of(even, ceil).has_pairs
    last = even.contiguous(memory_format=torch.channels_last)
    others = (odd, ceil), (odd.mT.contiguous(), ceil), (last, two)
    windows = [window for name, window in WINDOWS.items() if name != "2 by 2"]
    windows += [pool.Window((2, 2), (2, 1), (0, 0)), pool.Window((2, 2), (2, 2), (1, 0))]
    for x, window in (*others, *((even, window) for window in windows)):
        assert not pool.maps_of(x, window).has_pairs


def test_inputs_left_to_pytorch():
    two, x = WINDOWS["2 by 2"], torch.rand(2, 3, 8, 8)
    assert pool.maps_of(x, two) == pool.Maps(two, 8, 8, 4, 4, 1)
    last = x.contiguous(memory_format=torch.channels_last)
    assert pool.maps_of(last, two) == pool.Maps(two, 8, 8, 4, 4, 3)
    for y in (x.double(), x[0], x[:0], x[..., ::2], x.transpose(2, 3), x[:, :, :1], x.int()):
        assert pool.maps_of(y, two) is None
    sizes = [(9, 8), (1, 1), (0, 0)], [(2, 2), (0, 1), (0, 0)], [(0, 2), (1, 1), (0, 0)]
    for kernel, stride, padding in (*sizes, [(2, 2), (1, 1), (2, 0)], [(2, 2), (1, 1), (-1, 0)]):
        assert pool.maps_of(x, pool.Window(kernel, stride, padding)) is None


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [((2, 2), (2, 2)), ((4, 2), (2, 3)), ((1, 1), (2, 2))])
def test_means_equal_torch(device, window, dtype, memory_format):
    """Of integers in windows of 4, 8 and 1, whose means are exact in any dtype."""
    x = draw("ties").mul(4).to(device, dtype).contiguous(memory_format=memory_format)
    x.requires_grad_()
    maps = pool.maps_of(x, pool.Window(*window, (0, 0)))
    y = pool.avg_pool2d(x, maps)
    exact = F.avg_pool2d(x.double(), *window)
    torch.testing.assert_close(y, exact.to(dtype), rtol=0, atol=0, check_stride=True)
    grad = gradient(y)
    (found,) = torch.autograd.grad(y, x, grad)
    (expected,) = torch.autograd.grad(exact, x, grad.double())
    torch.testing.assert_close(found, expected.to(dtype), rtol=1e-6, atol=1e-6)
    assert suggest_memory_format(found) == memory_format
