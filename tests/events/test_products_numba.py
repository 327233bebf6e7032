"""Products with events on CPUs, at the edges of tiles and with any number of threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spikefuse.events import products_numba
from spikefuse.events.format import Events
from spikefuse.events.lists import FIRED, NEAR
from tests.events.products import check


@pytest.mark.parametrize("outputs", [1, 63, 64, 256, 257, 700])
@pytest.mark.parametrize("inputs", [1, 90])
def test_products(inputs: int, outputs: int) -> None:
    check(products_numba, inputs, outputs)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_nothing_and_everything(rate: float) -> None:
    check(products_numba, 40, 70, rate)


@pytest.mark.usefixtures("any_threads")
@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(40, 30, 700), (20, 7, 33), (1, 1, 300), (3, 0, 20)])
def test_threads_change_no_weight(
    shape: tuple[int, int, int], rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products_numba, "GROUPED", 1 << 15)
    torch.manual_seed(0)
    *sizes, width = shape
    drawn = torch.rand(*sizes, 90)
    drawn[..., 3:40] = 1.0  # inputs that never fire
    events = Events.from_marks((drawn < rate) * FIRED + ((drawn > 0.9) & (drawn < 1)) * NEAR)
    events = replace(events, values=events.is_fired())
    weight, grad = torch.randn(90, width), torch.randn(events.num_rows, width)
    results = []
    for threads in (1, 2, 5, 16):
        torch.set_num_threads(threads)
        size = products_numba.tile_width(width, events.num_rows)
        found = products_numba.gradients(events, grad, weight)
        results.append((size, products_numba.currents(events, weight, None), *found))
    for other in results[1:]:
        for one, two in zip(results[0][1:-1], other[1:-1], strict=True):
            assert torch.equal(one, two)
        torch.testing.assert_close(other[-1], results[0][-1], rtol=1e-5, atol=1e-4)
        assert other[0] != results[0][0] or torch.equal(other[-1], results[0][-1])


@pytest.mark.parametrize(
    ("width", "samples", "threads", "size"),
    [
        (980, 48, 1, 512),
        (980, 48, 2, 512),
        (980, 48, 3, 352),
        (980, 48, 8, 128),  # one tile per thread
        (980, 48, 16, 256),  # threads share samples
        (980, 4, 16, 256),
        (980, 3, 16, 192),  # too few samples
        (980, 1, 16, 64),
        (20, 4800, 16, 64),
        (33, 1, 1, 64),
    ],
)
def test_tiles(
    width: int, samples: int, threads: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert products_numba.tile_width(width, samples) == size
