"""Packing and unpacking, by every kernel and in every layout."""

from __future__ import annotations

import importlib

import pytest
import torch

from spikefuse.kernels import bits
from spikefuse.kernels.numba_host import MIN_TASK
from spikefuse.testing import DTYPES, LAYOUTS, lay_out, poisoned


def spikes(shape, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(shape, generator=generator) < 0.3).to(device, dtype)


def packed_by_hand(x):
    """The bytes, computed by PyTorch: value i is bit i % 8."""
    rows = torch.nn.functional.pad((x != 0).long(), (0, -len(x) % 8)).view(-1, 8)
    return (rows << torch.arange(8, device=x.device)).sum(1).to(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num", [1, 7, 8, 9, 64, 4096, 4097, 10_007])
def test_kernels(backends, dtype, num):
    x = spikes(num, dtype, backends.device)
    for impl in backends.impls:
        kernels = importlib.import_module(f"spikefuse.kernels.bits_{impl}")
        # Detects bytes that are not written, and writes past the end.
        found = torch.full((-(-num // 8) + 8,), 0xAA, dtype=torch.uint8, device=x.device)
        kernels.pack(x, found[:-8])
        assert torch.equal(found[:-8], packed_by_hand(x))
        assert (found[-8:] == 0xAA).all()
        back = torch.full((num + 8,), 7.0, dtype=dtype, device=x.device)
        kernels.unpack(found[:-8], back[:-8])
        assert torch.equal(back[:-8], x)
        assert (back[-8:] == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nonzero_values(backends, dtype):
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-7, float("inf"), float("nan")]).to(dtype)
    for impl in backends.impls:
        kernels = importlib.import_module(f"spikefuse.kernels.bits_{impl}")
        found = torch.zeros(1, dtype=torch.uint8, device=backends.device)
        kernels.pack(x.to(backends.device), found)
        assert found.item() == 0b1111100


def test_several_threads(backends):
    x = spikes(4 * MIN_TASK + 13, device=backends.device)
    packed = bits.pack(x)
    assert torch.equal(packed.bits, packed_by_hand(x))
    with poisoned():
        assert torch.equal(packed.unpack(), x)


def same(a, b):
    return (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()) and torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(backends, dtype, layout):
    x = lay_out(spikes((3, 2, 5, 3, 4), dtype, backends.device), layout)
    packed = bits.pack(x)
    assert packed.bits.dtype == torch.uint8
    assert packed.bits.nbytes == x.numel() // 8
    with poisoned():
        assert same(packed.unpack(), x)


def test_shapes(backends):
    x = spikes((4, 6, 8), device=backends.device)
    odd = x.as_strided((4, 1, 48), (48, 999, 1))
    for y in (x[1:3], x.permute(2, 0, 1), odd, x[0, 0, 0], x[:0], x[:, :, :0]):
        with poisoned():
            assert same(bits.pack(y).unpack(), y)


def test_views(backends):
    x = spikes((4, 6, 8), device=backends.device)
    packed = bits.pack(x)
    for view in (x[1], x[:, 2:4, 1], x.transpose(0, 2), x[:, :1].expand(4, 6, 8), x.view(-1)):
        strides, offset = view.stride(), view.storage_offset()
        found = packed._replace(shape=view.shape, strides=strides, offset=offset).unpack()
        assert same(found, view)
        assert found.storage_offset() == view.storage_offset()


def test_a_device_that_is_not_current(backends):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = spikes((1000,), device="cuda:1")
    assert torch.equal(bits.pack(x).unpack(), x)


def test_tensors_that_cannot_be_packed():
    x = spikes((4, 6))
    for y in (x[:, ::2], x[:, :3], x[:1].expand(4, 6)):
        with pytest.raises(ValueError, match=r"expected memory without gaps.*pass x\.contiguous"):
            bits.pack(y)
    for dtype in (torch.float64, torch.bool, torch.int32):
        with pytest.raises(TypeError, match=f"x is {dtype}: expected float32"):
            bits.pack(x.to(dtype))
    with pytest.raises(ValueError, match="no kernels for device 'meta': move x"):
        bits.pack(x.to("meta"))
