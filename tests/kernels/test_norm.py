"""Merging the statistics of several shares; `tests/block/test_block.py` tests the rest."""

from __future__ import annotations

import pytest
import torch

from spikefuse.kernels import norm_triton
from spikefuse.kernels.norm import merge_statistics
from spikefuse.kernels.running import Running
from spikefuse.testing import make_input, poisoned


@pytest.mark.parametrize(("channels", "count"), [(5, 1), (64, 3), (33, 8)])
def test_merge_statistics(backends, channels, count):
    """Shares of several sizes, with large means and small variances."""
    rows = [make_input((3 + i, channels), seed=i) + 1000 for i in range(count)]
    moments = [(x.double().mean(0), x.double().var(0, correction=0)) for x in rows]
    shares = torch.stack(
        [
            torch.cat((*m, torch.tensor([len(x)]))).float()
            for m, x in zip(moments, rows, strict=True)
        ]
    ).to(backends.device)
    whole, weight = torch.cat(rows).double(), make_input((channels,), device=backends.device)
    mean, variance = whole.mean(0), whole.var(0, correction=0)
    for impl in backends.impls:
        running = torch.zeros(channels), torch.ones(channels), torch.tensor(2)
        running = [t.to(backends.device) for t in running]
        with poisoned():
            found, number = merge_statistics(shares, weight, Running(*running, 0.25), 1e-5, impl)
        inverse = (variance + 1e-5).rsqrt().float()
        expected = mean.float(), weight.cpu() * inverse, inverse, variance.float()
        # Means of 1000 were rounded to 2^-14.
        torch.testing.assert_close(found.cpu(), torch.stack(expected), rtol=1e-3, atol=1e-3)
        assert number.item() == len(whole)
        updated = 0.25 * mean.float(), 0.75 + 0.25 * whole.var(0).float(), torch.tensor(3)
        torch.testing.assert_close([t.cpu() for t in running], [*updated], rtol=1e-3, atol=1e-3)
        plain, _ = merge_statistics(shares, None, Running(), 1e-5, impl)
        assert torch.equal(plain[1], plain[2])
        assert torch.equal(plain[[0, 2, 3]], found[[0, 2, 3]])


def test_counters_are_never_allocated_in_a_cuda_graph(monkeypatch):
    device, reserve = torch.device("cpu"), norm_triton.RESERVE
    monkeypatch.setattr(norm_triton, "_counters", {})
    monkeypatch.setattr(norm_triton, "_recorded", [])
    assert norm_triton._take_counters(4, device, captured=True) is None
    taken = []
    with torch.inference_mode():  # of this thread, as are the pools from which graphs allocate
        norm_triton.reserve_counters(device)
    for _ in range(3):
        taken.append(norm_triton._take_counters(reserve - 1, device, captured=False))
        taken.append(norm_triton._take_counters(reserve // 2, device, captured=True))
        taken.append(norm_triton._take_counters(reserve // 2, device, captured=True))
    assert all(t is not None and t.eq(0).all() and not t.is_inference() for t in taken)
    for number, t in enumerate(taken, 1):
        t.fill_(number)
    assert [t.unique().tolist() for t in taken] == [[n] for n in range(1, 10)]
    assert not any(t.data_ptr() % 16 for t in taken)
    assert norm_triton._take_counters(2 * reserve, device, captured=True) is None
    assert len(norm_triton._recorded) == 6
