"""Event lists sorted by input, with any number of threads."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from spikefuse.events.format import Events
from spikefuse.events.transpose_numba import transpose


@pytest.mark.usefixtures("any_threads")
@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("parts", [1, 3, 16])
@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("near", [False, True])
def test_transpose(size: int, near: bool, parts: int, threads: int) -> None:
    torch.set_num_threads(threads)
    marks = torch.randint(3, (12, 4, 30)) * (torch.rand(12, 4, 30) < 0.3)
    events = Events.from_marks(marks.float())
    lists = transpose(events, (12, 4), size, parts, near)
    edges, bases, starts, inputs, rows, entries = lists
    wanted = marks > 0 if near else marks == 2
    assert starts[-1] == len(rows) == wanted.sum()
    assert len(bases) == -(-4 // size) * parts + 1
    assert (edges[0], edges[-1], len(edges)) == (0, 30, parts + 1)
    assert (bases[0], bases[-1]) == (0, len(inputs))
    most = wanted.sum((0, 1)).max()
    seen = torch.zeros(wanted.shape)
    for k, (first, last) in enumerate(pairwise(bases)):
        group, part = divmod(k, parts)
        assert ((inputs[first:last] >= edges[part]) & (inputs[first:last] < edges[part + 1])).all()
        for s in range(first, last):
            assert starts[s] < starts[s + 1]
            assert (np.diff(rows[starts[s] : starts[s + 1]]) > 0).all()
            for place in range(starts[s], starts[s + 1]):
                b, t = divmod(int(rows[place]), 12)
                seen[t, group * size + b, inputs[s]] += 1
                assert events.indices[entries[place]] == inputs[s]
                assert events.rows()[entries[place]] == t * 4 + group * size + b
    assert torch.equal(seen, wanted.float())
    for begin, end in pairwise(edges):  # with about as many entries each
        assert abs(wanted[..., begin:end].sum() - wanted.sum() / parts) <= most + 1
