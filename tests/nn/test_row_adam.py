"""RowAdam: Adam where all rows have gradients, and nothing at all on rows that have none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spikefuse.nn import RowAdam


def steps(kind, grads: list[torch.Tensor], **options) -> nn.Parameter:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 40))
    optimizer = kind([weight], lr=0.01, **options)
    for grad in grads:
        weight.grad = grad
        optimizer.step()
    return weight


def sparse(x: torch.Tensor) -> torch.Tensor:
    rows = x.any(1).nonzero().T
    return torch.sparse_coo_tensor(rows, x[rows[0]], x.shape, check_invariants=False).coalesce()


def drawn(num_rows: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for k in range(5):
        grad = torch.randn(6, 40, generator=generator)
        grad[[(k + i) % 6 for i in range(6 - num_rows)]] = 0
        found.append(grad)
    return found


@pytest.mark.parametrize("make", [sparse, torch.clone])
def test_all_rows(make) -> None:
    expected = steps(torch.optim.Adam, drawn(6), betas=(0.8, 0.99))
    found = steps(RowAdam, [make(g) for g in drawn(6)], betas=(0.8, 0.99))
    torch.testing.assert_close(found, expected)


def test_some_rows() -> None:
    grads = [sparse(g) for g in drawn(2)]
    assert grads[0].indices().shape == (1, 2)
    expected = steps(torch.optim.SparseAdam, grads)
    torch.testing.assert_close(steps(RowAdam, grads), expected)
    untouched = steps(RowAdam, grads[:1])[:4]
    torch.testing.assert_close(untouched, steps(RowAdam, [])[:4], rtol=0, atol=0)


def test_no_rows() -> None:
    none = sparse(torch.zeros(6, 40))
    found = steps(RowAdam, [none])
    assert torch.equal(found, steps(RowAdam, []))


def test_a_saved_state() -> None:
    grads = drawn(6)
    expected = steps(RowAdam, grads)
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 40))
    state = RowAdam([weight]).state_dict()
    for grad in grads:
        optimizer = RowAdam([weight], lr=0.01)
        optimizer.load_state_dict(state)
        optimizer.param_groups[0]["lr"] = 0.01
        weight.grad = grad
        optimizer.step()
        state = optimizer.state_dict()
    assert torch.equal(weight, expected)


def test_wrong_numbers() -> None:
    with pytest.raises(ValueError, match="expected lr and eps of at least 0"):
        RowAdam([torch.zeros(1)], lr=-1.0)
