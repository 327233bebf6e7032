"""Products with events on CPUs: at the edges of tiles, and whatever the number of threads."""

from __future__ import annotations

import pytest
import torch

from spikefuse.kernels import event_numba
from spikefuse.kernels.events import Events
from tests.kernels.products import check


@pytest.mark.parametrize("outputs", [1, 63, 64, 256, 257, 700])
@pytest.mark.parametrize("inputs", [1, 90])
def test_products(inputs: int, outputs: int) -> None:
    check(event_numba, inputs, outputs)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_nothing_and_everything(rate: float) -> None:
    check(event_numba, 40, 70, rate)


def test_threads_change_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    events = Events.from_dense((torch.rand(40, 30, 90) < 0.1).float())
    weight, grad = torch.randn(90, 700), torch.randn(1200, 700)
    results = []
    for threads in (1, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found = event_numba.gradients(events, grad, weight, False)
        results.append((event_numba.currents(events, weight, None), found[1], found[2]))
        assert event_numba.tile_of(700) == (256 if threads == 1 else 192)
    for one, four in zip(*results, strict=True):
        assert torch.equal(one, four)


def test_spikes_by_input() -> None:
    x = (torch.rand(12, 4, 30) < 0.2).float()
    bases, counts, heads, ends, rows = event_numba.by_input(Events.from_dense(x), 12, 4)
    for b in range(4):
        begin = bases[b]
        seen = torch.zeros(12, 30)
        for s in range(bases[b], bases[b] + counts[b]):
            assert begin < ends[s]
            seen[rows[begin : ends[s]].astype(int), heads[s]] += 1
            begin = ends[s]
        assert torch.equal(seen, x[:, b])
