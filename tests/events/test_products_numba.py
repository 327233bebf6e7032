"""Products with events on CPUs: at the edges of tiles, and whatever the number of threads."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from spikefuse.events import products_numba as event_numba
from spikefuse.events.candidates import FIRED, SILENT
from spikefuse.events.format import Events
from tests.events.products import check


@pytest.mark.parametrize("outputs", [1, 63, 64, 256, 257, 700])
@pytest.mark.parametrize("inputs", [1, 90])
def test_products(inputs: int, outputs: int) -> None:
    check(event_numba, inputs, outputs)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_nothing_and_everything(rate: float) -> None:
    check(event_numba, 40, 70, rate)


@pytest.mark.usefixtures("any_threads")
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(40, 30, 700), (20, 7, 33), (1, 1, 300), (3, 0, 20)])
def test_threads_change_no_weight(
    shape: tuple[int, int, int], rate: float, sparse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_numba, "GROUPED", 1 << 15)
    torch.manual_seed(0)
    *sizes, width = shape
    drawn = torch.rand(*sizes, 90)
    drawn[..., 3:40] = 1.0  # inputs that never fire
    events = Events.from_marks((drawn < rate) * FIRED + ((drawn > 0.9) & (drawn < 1)) * SILENT)
    events = replace(events, values=events.is_fired())
    weight, grad = torch.randn(90, width), torch.randn(events.num_rows, width)
    results = []
    for threads in (1, 2, 5, 16):
        torch.set_num_threads(threads)
        size = event_numba.tile_of(width, events.num_rows)
        found = event_numba.gradients(events, grad, weight, sparse)
        results.append((size, event_numba.currents(events, weight, None), *found))
    for other in results[1:]:
        for one, two in zip(results[0][1:-1], other[1:-1], strict=True):
            assert one is two is None or torch.equal(one, two)
        torch.testing.assert_close(other[-1], results[0][-1], rtol=1e-5, atol=1e-4)
        assert other[0] != results[0][0] or torch.equal(other[-1], results[0][-1])


@pytest.mark.parametrize(
    ("width", "samples", "threads", "size"),
    [
        (980, 48, 1, 512),
        (980, 48, 2, 512),
        (980, 48, 3, 352),
        (980, 48, 8, 128),  # a tile for each
        (980, 48, 16, 256),  # samples are shared out
        (980, 4, 16, 256),
        (980, 3, 16, 192),  # not enough of them
        (980, 1, 16, 64),
        (20, 4800, 16, 64),
        (33, 1, 1, 64),
    ],
)
def test_tiles(
    width: int, samples: int, threads: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert event_numba.tile_of(width, samples) == size


@pytest.mark.usefixtures("any_threads")
@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("parts", [1, 3, 16])
@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("silent", [False, True])
def test_entries_by_input(size: int, silent: bool, parts: int, threads: int) -> None:
    torch.set_num_threads(threads)
    marks = torch.randint(3, (12, 4, 30)) * (torch.rand(12, 4, 30) < 0.3)
    events = Events.from_marks(marks.float())
    found = event_numba.by_input(events, 12, 4, size, parts, silent)
    edges, bases, starts, heads, rows, entries = found
    wanted = marks > 0 if silent else marks == 2
    assert starts[-1] == len(rows) == wanted.sum()
    assert len(bases) == -(-4 // size) * parts + 1
    assert (edges[0], edges[-1], len(edges)) == (0, 30, parts + 1)
    assert (bases[0], bases[-1]) == (0, len(heads))
    most = wanted.sum((0, 1)).max()
    seen = torch.zeros(wanted.shape)
    for k, (first, last) in enumerate(pairwise(bases)):
        group, part = divmod(k, parts)
        assert ((heads[first:last] >= edges[part]) & (heads[first:last] < edges[part + 1])).all()
        for s in range(first, last):
            assert starts[s] < starts[s + 1]
            assert (np.diff(rows[starts[s] : starts[s + 1]]) > 0).all()
            for place in range(starts[s], starts[s + 1]):
                b, t = divmod(int(rows[place]), 12)
                seen[t, group * size + b, heads[s]] += 1
                assert events.indices[entries[place]] == heads[s]
                assert events.rows()[entries[place]] == t * 4 + group * size + b
    assert torch.equal(seen, wanted.float())
    for begin, end in pairwise(edges):  # about as many in each
        assert abs(wanted[..., begin:end].sum() - wanted.sum() / parts) <= most + 1


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
