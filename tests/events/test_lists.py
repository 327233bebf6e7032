"""Event lists built, read and merged, by Numba and by Triton in its interpreter."""

from __future__ import annotations

import os
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from spikefuse.events import format as event_format
from spikefuse.events import lists_numba
from spikefuse.events.format import Events, merge_slices
from spikefuse.events.lists import FIRED, NEAR, SliceCounts

# More than two blocks of a program, but no multiple of it; and less than one.
WIDE, NARROW = 600, 7


def _rows(width: int) -> torch.Tensor:
    """Marks `[4, 3, W]` with empty rows, and rows of spikes only and of candidates only."""
    torch.manual_seed(0)
    found = torch.randint(0, 3, (4, 3, width)).float()
    found[0, 1], found[1, 0], found[2, 2] = 0.0, FIRED, NEAR
    found[3, 2] = 0.0  # the last
    return found


CASES = {
    "wide": _rows(WIDE),
    "narrow": _rows(NARROW),
    "one site": _rows(1),
    "one row": _rows(WIDE)[1:2, 1:2],
    "all fire": torch.full((2, 2, 300), FIRED),
    "none fire": torch.full((2, 2, 300), NEAR),
    "no entries": torch.zeros(3, 2, 5),
    "no rows": torch.zeros(3, 0, 5),
}


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "_"))
def marks(request: pytest.FixtureRequest) -> torch.Tensor:
    return CASES[request.param]


@pytest.fixture(params=["numba", "triton"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The kernels for all lists."""
    if request.param == "numba":
        return lists_numba
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs the interpreter")
    from spikefuse.events import lists_triton

    monkeypatch.setattr(event_format, "_kernels", lambda x: lists_triton)
    return lists_triton


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected)


def of_each(x: Events) -> list[tuple[int, int, float]]:
    """Return (row, site, value) of the entries, read one by one."""
    found = []
    for r in range(x.num_rows):
        begin, end = x.offsets[r : r + 2].tolist()
        for e in range(begin, end):
            found.append((r, int(x.indices[e]), float(e < begin + x.fired[r])))
    return found


def test_from_marks(marks: torch.Tensor, kernels: ModuleType) -> None:
    x, rows = Events.from_marks(marks), marks.flatten(0, 1)
    sites = [(row == mark).nonzero().flatten() for row in rows for mark in (FIRED, NEAR)]
    same(x.indices, torch.cat([torch.zeros(0), *sites]).int())
    same(x.fired, (rows == FIRED).sum(1).int())
    same(x.offsets, F.pad((rows > 0).sum(1).cumsum(0), (1, 0)))


def test_rows_and_values(marks: torch.Tensor, kernels: ModuleType) -> None:
    x = Events.from_marks(marks)
    entries = of_each(x)
    same(x.rows(), torch.tensor([e[0] for e in entries], dtype=torch.int64))
    same(x.indices, torch.tensor([e[1] for e in entries], dtype=torch.int32))
    same(x.is_fired(), torch.tensor([e[2] for e in entries], dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_to_dense(marks: torch.Tensor, kernels: ModuleType, dtype: torch.dtype) -> None:
    x = Events.from_marks(marks)
    same(x.to_dense(dtype), (marks == FIRED).to(dtype))
    grad = (torch.arange(len(x.indices)) % 250 + 1).to(dtype)
    expected = torch.zeros(marks.shape, dtype=dtype).view(-1)
    for (row, site, _), value in zip(of_each(x), grad, strict=True):
        expected[row * marks.shape[2] + site] = value
    same(x.with_values(grad).to_dense(dtype), expected.view(marks.shape))
    # The gradient of a sum is an expanded scalar.
    ones = x.with_values(torch.ones(()).expand(len(grad))).to_dense(dtype)
    same(ones, (marks > 0).to(dtype))


def test_to_dense_has_a_gradient(kernels: ModuleType) -> None:
    x = Events.from_marks(CASES["narrow"])
    x = x.with_values(x.is_fired().requires_grad_())
    weight = torch.rand(x.shape)
    (grad,) = torch.autograd.grad((x.to_dense() * weight).sum(), x.values)
    same(grad, weight.view(-1, NARROW)[x.rows(), x.indices.long()])


@pytest.mark.parametrize("limit", [1, 3, 290])
def test_truncate(marks: torch.Tensor, kernels: ModuleType, limit: int) -> None:
    x = Events.from_marks(marks)
    x = x.with_values(torch.rand(len(x.indices)).requires_grad_())
    few = x.truncate(limit)
    if not len(x.indices) or int(x.offsets.diff().max()) <= limit:
        assert few is x
        return
    stay = torch.cat([torch.arange(a, min(a + limit, b)) for a, b in zip(*_ends(x), strict=True)])
    same(few.indices, x.indices[stay])
    same(few.values.detach(), x.values.detach()[stay])
    same(few.fired, x.fired.clamp(max=limit))
    same(few.offsets, F.pad(x.offsets.diff().clamp(max=limit).cumsum(0), (1, 0)))
    assert few.dropped == x.num_fired - few.num_fired
    (grad,) = torch.autograd.grad(few.values.sum(), x.values)
    same(grad, torch.zeros_like(grad).index_fill(0, stay, 1.0))


def _ends(x: Events) -> tuple[list[int], list[int]]:
    return x.offsets[:-1].tolist(), x.offsets[1:].tolist()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_merge_slices(marks: torch.Tensor, kernels: ModuleType, number: int) -> None:
    """Merged lists of slices of the sites equal the list of all sites."""
    width = marks.shape[2]
    first = [width * k // number for k in range(number + 1)]
    slices = [Events.from_marks(marks[..., first[k] : first[k + 1]]) for k in range(number)]
    counts = SliceCounts.of(
        torch.stack([torch.stack((x.fired, x.offsets.diff().int())) for x in slices])
    )
    assert counts.sizes == [len(x.indices) for x in slices]
    # Padding must not be read as an entry.
    padded = [F.pad(x.indices, (0, counts.max_size - len(x.indices)), value=-9) for x in slices]
    for part in range(number):
        lists = torch.stack(padded), torch.tensor(first), counts
        found = merge_slices(marks.shape, *lists, part)
        whole, values, places = found
        expected = Events.from_marks(marks)
        for name in ("offsets", "fired", "indices"):
            same(getattr(whole, name), getattr(expected, name))
        same(values, expected.is_fired())
        assert places.dtype == torch.int64
        same(whole.indices[places], slices[part].indices + first[part])
        same(whole.rows()[places], slices[part].rows())


@pytest.mark.parametrize("width", [31, 32, 64, 1010])
def test_lists_of_any_words(width: int) -> None:
    """Rows with no, all and some entries, in words the last of which is partly used."""
    marks = torch.randint(3, (6, 2, width)).float()
    marks[1], marks[2], marks[3] = 0, FIRED, NEAR
    marks[4] *= torch.rand(2, width) < 0.02
    events = Events.from_marks(marks)
    for row, begin, end, fired in zip(
        marks.flatten(0, 1), events.offsets, events.offsets[1:], events.fired, strict=False
    ):
        found = events.indices[begin:end]
        assert torch.equal(found[:fired], (row == FIRED).nonzero().flatten().int())
        assert torch.equal(found[fired:], (row == NEAR).nonzero().flatten().int())
