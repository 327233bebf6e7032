"""Products with events on CPUs: at the edges of tiles, and whatever the number of threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spikefuse.kernels import event_numba
from spikefuse.kernels.events import Events
from spikefuse.neurons.candidates import FIRED, SILENT
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
        assert event_numba.tile_of(700, 1200) == (512 if threads == 1 else 256)
    for one, four in zip(*results, strict=True):
        assert torch.equal(one, four)


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("silent", [False, True])
def test_entries_by_input(size: int, silent: bool) -> None:
    marks = torch.randint(3, (12, 4, 30)) * (torch.rand(12, 4, 30) < 0.3)
    events = Events.from_marks(marks.float())
    found = event_numba.by_input(events, 12, 4, size, 1, silent)
    _, bases, starts, heads, rows, entries = found
    wanted = marks > 0 if silent else marks == 2
    assert starts[-1] == len(rows) == wanted.sum()
    assert len(bases) == -(-4 // size) + 1
    assert bases[0] == 0
    assert bases[-1] == len(heads)
    for group in range(len(bases) - 1):
        samples = wanted[:, group * size : (group + 1) * size]
        seen = torch.zeros(samples.shape)
        for s in range(bases[group], bases[group + 1]):
            assert starts[s] < starts[s + 1]
            assert (np.diff(rows[starts[s] : starts[s + 1]]) > 0).all()
            for k in range(starts[s], starts[s + 1]):
                b, t = divmod(int(rows[k]), 12)
                seen[t, b, heads[s]] += 1
                assert events.indices[entries[k]] == heads[s]
                assert events.rows()[entries[k]] == t * 4 + group * size + b
        assert torch.equal(seen, samples.float())


@pytest.mark.parametrize("width", [31, 32, 64, 1010])
def test_lists_of_any_words(width: int) -> None:
    """Rows with nothing, with all and with some, whose last word is not whole."""
    marks = torch.randint(3, (6, 2, width)).float()
    marks[1], marks[2], marks[3] = 0, FIRED, SILENT
    marks[4] *= torch.rand(2, width) < 0.02
    events = Events.from_marks(marks)
    for row, begin, end, fired in zip(
        marks.flatten(0, 1), events.offsets, events.offsets[1:], events.fired, strict=False
    ):
        found = events.indices[begin:end]
        assert torch.equal(found[:fired], (row == FIRED).nonzero().flatten().int())
        assert torch.equal(found[fired:], (row == SILENT).nonzero().flatten().int())
