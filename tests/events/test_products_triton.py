"""Products with events on GPUs, in the interpreter."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from spikefuse.events.format import Events
from spikefuse.events.lists import NEAR
from tests.events.products import check, close

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter"
)


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 33), (40, 600)])
def test_products(inputs: int, outputs: int) -> None:
    from spikefuse.events import products_triton

    check(products_triton, inputs, outputs)


@pytest.mark.parametrize("rate", [0.0, 0.4, 1.0])
def test_activities(rate: float) -> None:
    from spikefuse.events import products_triton

    check(products_triton, 20, 33, rate)


def test_candidates_only() -> None:
    from spikefuse.events import products_triton

    events = Events.from_marks(torch.full((2, 3, 5), NEAR))
    events = replace(events, values=events.is_fired())
    grad, weight = torch.rand(6, 4), torch.rand(5, 4)
    found, _, values = products_triton.gradients(events, grad, weight)
    assert torch.equal(found, torch.zeros(5, 4))
    close(values, (grad.double() @ weight.double().T).flatten())


def test_gradients_are_summed_in_the_order_of_the_lists() -> None:
    """This makes them reproducible; in reverse order, these would sum to 0."""
    from spikefuse.events import products_triton

    events = Events.from_dense(torch.ones(4, 1, 2))
    grad = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])
    found = products_triton.gradients(events, grad, torch.zeros(2, 1))[0]
    assert torch.equal(found, torch.ones(2, 1))
