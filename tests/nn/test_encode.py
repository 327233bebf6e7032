"""Encodings: rates, reproducibility, no copies, errors."""

from __future__ import annotations

import pytest
import torch

import spikefuse as sf
from spikefuse.nn.encode import direct, poisson


def test_encodings_need_no_import_of_their_own() -> None:
    assert sf.nn.encode.direct is direct


def test_direct_repeats_without_a_copy() -> None:
    x = torch.rand(3, 2, 5)
    y = direct(x, 7)
    assert y.shape == (7, 3, 2, 5)
    assert y.stride(0) == 0
    assert y.data_ptr() == x.data_ptr()
    assert all(torch.equal(step, x) for step in y)


def test_poisson_rates() -> None:
    x = torch.tensor([-0.5, 0.0, 0.1, 0.5, 0.9, 1.0, 1.5])
    y = poisson(x, 20_000, torch.Generator().manual_seed(0))
    assert set(y.unique().tolist()) == {0.0, 1.0}
    error = (y.mean(0) - x.clamp(0, 1)).abs()
    deviation = (x.clamp(0, 1) * (1 - x.clamp(0, 1)) / 20_000).sqrt()
    assert (error <= 4 * deviation).all()


def test_poisson_is_a_function_of_the_generator() -> None:
    x = torch.rand(4, 9)
    first = poisson(x, 5, torch.Generator().manual_seed(1))
    assert torch.equal(first, poisson(x, 5, torch.Generator().manual_seed(1)))
    assert not torch.equal(first, poisson(x, 5, torch.Generator().manual_seed(2)))
    torch.manual_seed(1)
    assert torch.equal(first, poisson(x, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_poisson_preserves_the_dtype_and_draws_finely(dtype: torch.dtype) -> None:
    x = torch.full((100_000,), 0.002, dtype=dtype)  # below the step of a bfloat16 draw
    y = poisson(x, 2, torch.Generator().manual_seed(0))
    assert y.dtype == dtype
    assert abs(y.double().mean().item() - 0.002) < 0.0005


def test_errors_say_what_was_expected() -> None:
    x = torch.rand(3)
    for steps in (0, -1, 2.5):
        with pytest.raises(ValueError, match="expected an integer of at least 1"):
            direct(x, steps)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no dimensions"):
        poisson(torch.tensor(0.5), 3)
    with pytest.raises(TypeError, match=r"expected a tensor \[B, \.\.\.\]"):
        poisson([0.5], 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="such as pixels / 255"):
        poisson(torch.ones(3, dtype=torch.uint8), 3)
    with pytest.raises(ValueError, match="generator is on cpu, x on meta"):
        poisson(torch.rand(3, device="meta"), 2, torch.Generator())
